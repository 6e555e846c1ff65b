"""`knobwise train`: a run, or with -m a sweep of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from knobwise.common.lazy import uncollected
from knobwise.common.progress import has_terminal, say
from knobwise.experiments.command_line.registry import question_of_experiment
from knobwise.experiments.settings.options import TrainRun

if TYPE_CHECKING:
    from knobwise.experiments.settings.selector_options import SelectorRun
    from knobwise.experiments.train.run import Experiment


def train(
    config: TrainRun | SelectorRun, words: list[str], named: list[str], once: bool = False
) -> Path:
    """Train a controller or a selector, and return the folder of the run.

    Args:
        words: the `key=value` words of the command.
        named: those of them that the run is named after.
        once: whether a finished run of the same settings on the same data is left as it is.

    Raises:
        InputError: settings or files that cannot be used; nothing has been written then.
    """
    question = question_of_experiment(config.experiment)
    tracking = replace(config.tracking, notes=config.tracking.notes or question)
    if has_terminal():  # where somebody waits for the next line, which takes seconds
        say(
            f"{config.experiment}: {question}\ntraining with seeds={config.seeds}; loading "
            "PyTorch and the data …"
        )
    settings = replace(config, tracking=tracking)
    experiment: Experiment
    # imported here, since PyTorch takes seconds
    with uncollected():
        if tracking.mode != "disabled":
            # what a W&B run needs; pydantic looks for the source of some of its classes in all
            # modules there are, so that after PyTorch this takes three times as long (.13 s, .42)
            import wandb.apis.public  # noqa: F401

        from knobwise.experiments.train.launch import launch

        if isinstance(settings, TrainRun):
            from knobwise.experiments.train.controller import ControllerExperiment

            experiment = ControllerExperiment(settings)
        else:
            from knobwise.experiments.train.selector import SelectorExperiment

            experiment = SelectorExperiment(settings)
    return launch(experiment, words, named, once)
