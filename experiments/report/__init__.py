"""Results in words, tables and pages.

In the order of the data: `runs` are found and read; `paired` tests the differences between two;
`comparison` makes one thing of one run or several. `verdict`, `between_runs` and `choices` decide
what is said of them, in the words of `sentences`; `content` and `sections` make tables and the list
of what a page shows, `figures` and `training_curves` draw by `charts`; `page` and `tables` write
them as HTML and on a terminal. `report` does all that for a folder, `inspection` for a profile.
`policies` compares policies without a run.
"""
