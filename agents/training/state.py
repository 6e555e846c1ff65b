"""Where a training stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from knobwise.common.errors import InputError


@dataclass
class Best:
    """The best evaluation."""

    score: float = -math.inf
    iteration: int = -1
    """−1 before there is any."""
    state: dict[str, Tensor] | None = None
    """The weights of the agent."""
    metrics: dict[str, float] = field(default_factory=dict)
    by_sample: Tensor | None = None
    """The score of each held-out sample, where they are noted."""


@dataclass
class TrainingState:
    """Where a training stands: what `last.pt` holds beside the agent."""

    identity: str
    """What a training must agree with to go on from it, beside the data."""
    iteration: int = 0
    """The number of iterations that are done, or left out where a stage ended early."""
    finished: bool = False
    """True at the end; then nothing is learned any more."""
    best: Best = field(default_factory=Best)
    scores: list[tuple[int, float]] = field(default_factory=list)
    """Iteration and score of every evaluation."""
    rows: int = 0
    """The number of rows that were logged: those of `metrics.csv` that count."""
    # what live objects hold, taken when the state is saved
    agent: dict[str, Any] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    contexts: Any = None
    """The state of the generator of contexts."""
    random: list[Tensor] = field(default_factory=list)
    """The state of torch's generators."""

    def plain(self) -> dict[str, Any]:
        """Return tensors and plain values, for a checkpoint."""
        return vars(self) | {"best": vars(self.best)}

    @classmethod
    def restored(cls, plain: Mapping[str, Any], path: Path) -> TrainingState:
        """Return the state that `plain` describes; `path` is for messages.

        Raises:
            InputError: another version wrote it.
        """
        if plain.keys() != {part.name for part in fields(cls)}:
            raise InputError(
                f"{path}: was written by another version of knobwise, and only that version can "
                "resume it; start again under another name=…"
            )
        return cls(**{**plain, "best": Best(**plain["best"])})


class Provenance(TypedDict, total=False):
    """How an agent came about; which keys there are depends on the agent and on the file."""

    training: dict[str, Any]
    """In `last.pt` alone: a `TrainingState` as plain values."""
    reward_spread: float | None
    seen: list[str]
    """Fingerprints of the samples, or queries, that it was trained on."""

    # of a controller
    proof: list[str]
    """Those of the samples among them that a promise alone was tested on."""
    validation_utility: float
    """The best score on validation."""
    judged_by: str
    """What that is: `utility` or `reward`."""
    iteration: int
    method: str
    """The name of the last stage, such as GRPO."""
    grpo: dict[str, float]
    """The score on validation where GRPO starts."""
    grpo_held_out: dict[str, Tensor]
    """Scores by held-out sample, before GRPO and of the kept weights."""
    before_grpo: dict[str, Tensor] | None
    """The weights before GRPO."""
    fold_seed: int
    train_rows: Tensor
    validation_rows: Tensor
    test_rows: Tensor
    judged: Any
    """How it did on test samples, as in `results.json`."""
    versions: list[str]
    """Digests of the versions that `knobwise update` made it of."""
    loss: float
    """What those updates may have cost, in utility."""
    adapted: dict[str, Any]
    """The timed cells that it was adapted to other hardware by."""

    # of a selector
    validation: float
    epoch: int
    shots: int
    policy: str | None
    """The name of its variant."""
    fitted: list[str]
    """The ids of the queries that it was trained on."""
