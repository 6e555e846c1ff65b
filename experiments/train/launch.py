"""A run from settings to a report, for controllers and selectors alike: prepare, claim a folder,
train, and finish."""

from __future__ import annotations

from pathlib import Path

from knobwise.common.progress import say
from knobwise.experiments.evidence.run_folder import claim_folder, finished_run, taken_up_if_damaged
from knobwise.experiments.tracking.tracker import git_commit
from knobwise.experiments.train.run import Experiment


def launch(
    experiment: Experiment, overrides: list[str], named: list[str], once: bool = False
) -> Path:
    """Train, judge and report; return the run's folder.

    Repeat it with the same settings to resume an interrupted run.

    Args:
        overrides: the `key=value` words of the command line.
        named: those of them that the run is named after.
        once: whether a finished run of the same settings and data is left as it is.

    Raises:
        InputError: data or settings that cannot be used, or the folder cannot.
    """
    # noted first, before anybody edits the code that runs
    commit = git_commit()
    experiment.prepare()
    config = experiment.config
    for note in experiment.notes:
        say(note)
    finished = finished_run(config, named, experiment.table.digest) if once else None
    if finished is not None and not taken_up_if_damaged(finished):
        say(f"already finished, skipped: {finished}")
        return finished
    # the folder stays locked until everything is written
    with claim_folder(config, named) as folder:
        say(f"run: {folder}")
        experiment.train(folder)
        # what judges and reports is imported when there is something to judge
        from knobwise.experiments.train.finish import finish, print_finished

        results, mode = finish(experiment, folder, overrides, commit)
    print_finished(folder, results, mode)
    return folder
