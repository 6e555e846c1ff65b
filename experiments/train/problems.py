"""What the controllers of a run are trained for: from its settings to the problem of each split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from knobwise.agents.calibration.promise import HELD_BACK, check_promise
from knobwise.agents.evaluation.problems import judged_part, problem_of
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.readers.joint import with_dataset_input
from knobwise.envs.tables.divisions import divide, hold_back
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.profiles import read_profile

if TYPE_CHECKING:
    from knobwise.agents.deployed.text import TextEncoder


def facts_of_run(config: TrainRun, table: ProfileTable | None = None) -> ProfileTable:
    """Return the profile that a run trains on; `table` takes the place of the one that the settings
    name."""
    if table is None:
        table = read_profile(config.profile)
    return with_dataset_input(table) if config.policy.dataset_input else table


def problem_of_run(config: TrainRun, facts: ProfileTable, number: int = 0) -> Problem:
    """Return the problem of one split of a run.

    Args:
        facts: see `facts_of_run`.
        number: of the split, counted from 0.

    Raises:
        InputError: a split, a text or a budget that cannot be used.
    """
    split = judged_part(divide(facts, **asdict(config.split), number=number))
    held_back = None
    if config.policy.promise is not None:
        split, held_back = hold_back(facts, split, HELD_BACK, config.split.seed + number)
    encoders = encoders_of_start(config.init_from)
    if facts.texts:
        # most tables have none, and need nothing that encodes them
        from knobwise.agents.evaluation.texts import encoded_by, fit_encoders

        encoders = encoders or fit_encoders(facts, split, config.chat)
        facts = encoded_by(facts, encoders)
    problem = problem_of(facts, split, config.budget, config.unprofiled, encoders)
    if held_back is None:
        return problem
    problem = replace(problem, calibration=held_back)
    check_promise(problem)
    return problem


def encoders_of_start(init_from: str | None) -> Mapping[str, TextEncoder]:
    """Return what encodes texts for the weights that training starts from, which know what these
    numbers mean; {} for fresh weights."""
    if not init_from:
        return {}
    encoders: Mapping[str, TextEncoder] = load_checkpoint(
        checkpoint_at(init_from)
    ).controller.decider.texts
    return encoders
