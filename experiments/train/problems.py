"""What the controllers of a run are trained for: from its settings to the problem of each split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from knobwise.agents.calibration.promise import (
    HELD_BACK,
    check_promise,
    largest_promise,
    requests_needed,
    requests_of,
)
from knobwise.agents.evaluation.problems import judged_part, problem_of
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
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
        InputError: a split, a text or a budget that cannot be used, or a promise that no training
            could give, see `refuse_few_requests`.
    """
    split = judged_part(divide(facts, **asdict(config.split), number=number))
    held_back = None
    if config.policy.promise is not None:
        refuse_few_requests(config, facts, number)
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


# -- samples that a promise takes ------------------------------------------------------------------

COUNTED = 100_000
"""Samples up to which those that a promise takes are counted by splitting tables; a larger number
is in the ratio of the requests."""


def refuse_few_requests(config: TrainRun, facts: ProfileTable, number: int = 0) -> None:
    """Refuse a promise that the requests held back could not show, however fast the answers are.

    Args:
        facts: see `facts_of_run`.
        number: of the split, counted from 0.

    Raises:
        InputError: there are too few of them.
    """
    promise = config.policy.promise
    assert promise is not None
    needed = requests_needed(promise)
    held = requests_held_back(config, facts, number)
    if held >= needed:
        return
    total = facts.num_samples
    ways = [
        f"measure {samples_needed(config, facts, needed, held, number):,} samples",
        f"promise at most policy.promise={largest_promise(held):g}",
    ]
    train = share_needed(config, facts, needed, number)
    if train is not None:
        split = replace(config.split, train=train)
        judged = len(divide(facts, **asdict(split), number=number).test)
        ways.append(f"take split.train={train:g}, which leaves {judged:,} to judge by")
    raise InputError(
        f"policy.promise={promise:g}: takes {needed:,} independent requests that are held back, "
        f"all of them on time; of the {total:,} samples of profile {facts.name!r} this split holds "
        f"{held:,} back; {', or '.join(ways)}"
    )


def requests_held_back(config: TrainRun, facts: ProfileTable, number: int = 0) -> int:
    """Return how many independent requests a promise would be tested on: of a cluster one."""
    split = divide(facts, **asdict(config.split), number=number)
    part, held_back = hold_back(facts, split, HELD_BACK, config.split.seed + number)
    return len(requests_of(Problem(facts, part), held_back).rows)


def samples_needed(
    config: TrainRun, facts: ProfileTable, needed: int, held: int, number: int = 0
) -> int:
    """Return how many samples like these hold enough requests back.

    Args:
        needed: requests.
        held: how many these samples hold back, fewer than are needed.
    """
    about = math.ceil(facts.num_samples * needed / held)
    if about > COUNTED:
        return about
    fewer, enough = facts.num_samples, about
    while requests_held_back(config, with_samples(facts, enough), number) < needed:
        fewer, enough = enough, enough + enough // 8 + 1
    while enough - fewer > 1:
        middle = (fewer + enough) // 2
        if requests_held_back(config, with_samples(facts, middle), number) < needed:
            fewer = middle
        else:
            enough = middle
    return enough


def with_samples(facts: ProfileTable, count: int) -> ProfileTable:
    """Return a table of so many samples that is split as this one would be with as many: with its
    ids and names in turn, new ones each time, and hardly any content."""
    rows = [divmod(i, facts.num_samples) for i in range(count)]

    def again(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{names[row]}/{turn}" for turn, row in rows) if names else ()

    def same(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[row] for _, row in rows) if names else ()

    ones = torch.ones(count, 1)
    return ProfileTable(
        name=facts.name,
        knobs=facts.knobs,
        configurations=facts.configurations[:1],
        accuracy=ones,
        latency_ms=ones,
        mask=ones.bool(),
        sample_ids=again(facts.sample_ids),
        datasets=same(facts.datasets),
        image_ids=again(facts.image_ids),
        clusters=again(facts.clusters),
        parts=same(facts.parts),
    )


def share_needed(
    config: TrainRun, facts: ProfileTable, needed: int, number: int = 0
) -> float | None:
    """Return the smallest `split.train`, in hundredths, that holds enough requests back and leaves
    something to judge by; None where there is none."""
    validation = config.split.validation
    for percent in range(math.floor(100 * config.split.train) + 1, 100):
        train = percent / 100
        if train + validation >= 1:
            break
        try:
            held = requests_held_back(
                replace(config, split=replace(config.split, train=train)), facts, number
            )
        except InputError:
            # nothing is left to judge by
            break
        if held >= needed:
            return train
    return None
