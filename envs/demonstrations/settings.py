"""The settings of demonstration rewards and groups, and the names in beam data."""

from __future__ import annotations

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


MODES = ("legacy", "hard_plus_soft_v2")
AUTO = "auto"
"""The default: the mode follows from what was recorded, see `DemonstrationRewardConfig.resolved`."""
USUAL = "hard_plus_soft_v2"
"""The mode of `auto`, unless only scores were recorded."""


@dataclass
class DemonstrationRewardConfig:
    """The training signal of the selector. c = vqa_correct, a = vqa_acc_score, i = information."""

    mode: str = AUTO
    """`auto`: `hard_plus_soft_v2`, or `legacy` if only scores were recorded, no right answers · `legacy`: i ·
    `hard_plus_soft_v2`: 2·c + a, so that every right answer is above every wrong one."""
    information: str = "beam_score"
    """i: `beam_score` (gain over no demonstration), `logprob_score`, or another outcome that was recorded."""
    shuffled: bool = False
    """A control: rewards are permuted inside each group, so that there is nothing to learn."""

    def __post_init__(self) -> None:
        one_of("reward.mode", self.mode, (AUTO, *MODES))
        one_of("reward.information", self.information, FIELDS)

    def resolved(self, recorded: Collection[str]) -> DemonstrationRewardConfig:
        """The same, with `auto` replaced by the mode for beams that have these fields."""
        if self.mode != AUTO:
            return self
        scores_only = self.information in recorded and {"vqa_correct", "vqa_acc_score"}.isdisjoint(recorded)
        return replace(self, mode="legacy" if scores_only else USUAL)

    @property
    def weights(self) -> dict[str, float]:
        """What the reward adds up: names in `FIELDS`, each with its weight."""
        return {self.information: 1.0} if self.mode == "legacy" else {"vqa_correct": 2.0, "vqa_acc_score": 1.0}


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
