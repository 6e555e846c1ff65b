"""Readers that make tables of files of measurements.

The way of a file, in the order of the data:

- `frames`: a file of any suffix becomes a frame of text and numbers (with `arff`, `nested`,
  `split_json`, `folders`).
- `tool_files`: what a tool wrote is recognised by how it begins, and has columns that are known
  (`promptfoo`, `inspect_logs`, … → `tool_rows`, `joined_files`).
- `long_table` does the rest: `layouts` gives columns our names, `measured_rows` makes numbers of
  measurements (`quantities`: units and directions; `failures`), `column_roles` tells knobs and
  features from outcomes (by `column_names` and `design`), and `dense_table` has a cell for each
  sample and configuration (`repeats`). `other_tables` says what a table is that is no profile.
- `feature_columns` and `feature_files` make numbers of features. `knobwise.envs.tables.copies` then
  tells which samples have the same, so that no split parts them.

`exp_files` and `configuration_files` read the files of the original systems, and `joint` joins
several tables.

A new type of file that holds tables is only a suffix in `folders.TABLES` and a branch of
`frames._read`. A tool whose files need more than that has a module here, and an entry in
`tool_files.FORMATS`.

A new reader is a module here that ends in `long_table.table_from_frame`. To choose it as
`profile=…`, add a dataclass in `knobwise.experiments.settings.profiles`, with an entry in
`PROFILES` and one in the table of `_read` there, and its name in
`experiments/command_line/usage.txt`.
"""
