"""The settings of demonstration rewards and groups, and the names in beam data."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError

FIELDS = ("beam_score", "logprob_score", "vqa_correct", "vqa_acc_score", "vqa_gt_prob", "vqa_rel_score")
"""Outcomes that can be recorded for a beam: information gain, log-probability of the answer, right or wrong (0 or 1),
soft accuracy, probability of the true answer, relevance."""
METHODS = ("beam", "sample", "retrieval", "random", "policy")
"""How a beam was found. Only `beam` looked at the answer."""
GROUPS = {"all": METHODS, "without_beams": METHODS[1:], "own": ("policy",), "beams": ("beam",)}
"""Methods by name. `without_beams`: found without looking at the answer; `own`: draws of a policy only."""


WEIGHTS = ("hard_weight", "soft_weight", "alpha", "beta")
MODES = {
    "legacy": {"alpha": 1.0, "beta": 0.0},
    "hard_plus_soft": {"hard_weight": 1.0, "soft_weight": 1.0},
    "hard_plus_soft_v2": {"hard_weight": 2.0, "soft_weight": 1.0},
}
"""The weights that each mode has, with their defaults."""
AUTO = "auto"
"""The default: the mode follows from what was recorded, see `DemonstrationRewardConfig.resolved`."""
USUAL = "hard_plus_soft_v2"
"""The mode of `auto`, unless only scores were recorded."""


@dataclass
class DemonstrationRewardConfig:
    """The training signal of the selector. c = vqa_correct, a = vqa_acc_score, i = information.

    A weight of None takes the mode's default in `MODES`; a weight that the mode does not have is refused.
    """

    mode: str = AUTO
    """`auto`: `hard_plus_soft_v2`, or `legacy` if only scores were recorded, no right answers · `legacy`: α·i + β·c ·
    `hard_plus_soft`: h·c + s·a · `hard_plus_soft_v2`: the same with h = 2, so that every right answer is above every
    wrong one."""
    hard_weight: float | None = None
    """h, weight of a right answer."""
    soft_weight: float | None = None
    """s, weight of the soft accuracy."""
    alpha: float | None = None
    """α, weight of the information."""
    beta: float | None = None
    """β, weight of the correctness in `legacy`."""
    information: str = "beam_score"
    """i: `beam_score` (gain over no demonstration) or `logprob_score`."""
    shuffled: bool = False
    """A control: rewards are permuted inside each group, so that there is nothing to learn."""

    def __post_init__(self) -> None:
        one_of("reward.mode", self.mode, (AUTO, *MODES))
        one_of("reward.information", self.information, ("beam_score", "logprob_score"))
        mode = MODES[USUAL if self.mode == AUTO else self.mode]
        for name in sorted(WEIGHTS):
            value = getattr(self, name)
            if value is not None and name not in mode:
                raise InputError(f"reward.{name}: mode {self.mode} has no such weight, it has {', '.join(mode)}")
            if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise InputError(f"reward.{name}={value!r}: must be a number ≥ 0")
        if not any(self.weights.values()):
            raise InputError(f"reward: all weights of mode {self.mode} are 0, so every sequence has reward 0")

    def resolved(self, recorded: Collection[str]) -> DemonstrationRewardConfig:
        """The same, with `auto` replaced by the mode for beams that have these fields. Raises InputError: a weight that
        this mode does not have."""
        if self.mode != AUTO:
            return self
        scores_only = self.information in recorded and {"vqa_correct", "vqa_acc_score"}.isdisjoint(recorded)
        return replace(self, mode="legacy" if scores_only else USUAL)

    @property
    def weights(self) -> dict[str, float]:
        """What the reward adds up: names in `FIELDS`, each with its weight."""
        chosen = {name: value for name in WEIGHTS if (value := getattr(self, name)) is not None}
        weights = MODES[USUAL if self.mode == AUTO else self.mode] | chosen
        if self.mode == "legacy":
            return {self.information: weights["alpha"], "vqa_correct": weights["beta"]}
        return {"vqa_correct": weights["hard_weight"], "vqa_acc_score": weights["soft_weight"]}

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields with a weight above 0."""
        return tuple(name for name, weight in self.weights.items() if weight)


@dataclass
class GroupConfig:
    """The recorded sequences of a query that form its group."""

    methods: str | Sequence[str] = "all"
    """A name in `GROUPS`, or some of `METHODS`."""
    rounds: int | None = None
    """Keep draws of a policy from only this many latest rounds; None keeps all."""

    def __post_init__(self) -> None:
        if isinstance(self.methods, str) and self.methods in GROUPS:
            self.methods = GROUPS[self.methods]
        elif not self.methods or isinstance(self.methods, str) or not set(self.methods) <= set(METHODS):
            raise InputError(
                f"groups.methods={self.methods!r}: must be {', '.join(GROUPS)}, or a list of {', '.join(METHODS)}"
            )
        self.methods = tuple(self.methods)
        if self.rounds is not None and self.rounds < 1:
            raise InputError(f"groups.rounds={self.rounds}: must be ≥ 1, or null for all rounds")
