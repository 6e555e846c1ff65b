"""The settings of demonstration rewards and groups, and the names in beam data."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

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
    "hybrid": {"alpha": 0.5, "hard_weight": 1.0, "soft_weight": 0.5},
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
    wrong one · `hybrid`: α·min(1, scale·i) + (1 − α)(h·c + s·a)."""
    hard_weight: float | None = None
    """h, weight of a right answer."""
    soft_weight: float | None = None
    """s, weight of the soft accuracy."""
    alpha: float | None = None
    """α, weight of the information; in `hybrid` in [0, 1]."""
    beta: float | None = None
    """β, weight of the correctness in `legacy`."""
    information: str = "beam_score"
    """i: `beam_score` (gain over no demonstration) or `logprob_score`."""
    information_scale: float = 10.0
    """What the information is multiplied by in `hybrid`."""
    by_shots: dict[int, dict[str, float]] = field(default_factory=dict)
    """For each number of demonstrations, weights by name that replace the others for sequences of that length."""
    shuffled: bool = False
    """A control: rewards are permuted inside each group, so that there is nothing to learn."""

    def __post_init__(self) -> None:
        one_of("reward.mode", self.mode, (AUTO, *MODES))
        one_of("reward.information", self.information, ("beam_score", "logprob_score"))
        if not _finite(self.information_scale) or self.information_scale <= 0:
            raise InputError(f"reward.information_scale={self.information_scale!r}: must be a number > 0")
        try:
            self.by_shots = {int(shots): dict(weights) for shots, weights in self.by_shots.items()}
        except (TypeError, ValueError, AttributeError):
            raise InputError(
                f"reward.by_shots={self.by_shots!r}: must give weights by name for each number of demonstrations, as "
                "in {2: {hard_weight: 1.0}}"
            ) from None
        mode, every = self._mode, {name: value for name in WEIGHTS if (value := getattr(self, name)) is not None}
        for shots, weights in ((None, every), *self.by_shots.items()):
            key = "reward" if shots is None else f"reward.by_shots.{shots}"
            for name, value in sorted(weights.items()):
                if name not in mode:
                    raise InputError(f"{key}.{name}: mode {self.mode} has no such weight, it has {', '.join(mode)}")
                if not _finite(value) or value < 0:
                    raise InputError(f"{key}.{name}={value!r}: must be a number ≥ 0")
            if shots is not None and shots < 1:
                raise InputError(f"reward.by_shots.{shots}: a sequence has at least one demonstration")
            if self.mode == "hybrid" and self._setting("alpha", shots) > 1:
                raise InputError(f"{key}.alpha={self._setting('alpha', shots)!r}: must be in [0, 1] in mode hybrid")
            if not any(self.weights(shots).values()):
                raise InputError(f"{key}: all weights of mode {self.mode} are 0, so every sequence has reward 0")

    def resolved(self, recorded: Collection[str]) -> DemonstrationRewardConfig:
        """The same, with `auto` replaced by the mode for beams that have these fields. Raises InputError: a weight that
        this mode does not have."""
        if self.mode != AUTO:
            return self
        scores_only = self.information in recorded and {"vqa_correct", "vqa_acc_score"}.isdisjoint(recorded)
        return replace(self, mode="legacy" if scores_only else USUAL)

    @property
    def _mode(self) -> dict[str, float]:
        return MODES[USUAL if self.mode == AUTO else self.mode]

    def _setting(self, name: str, shots: int | None) -> float:
        value: float | None = getattr(self, name)
        replaced = {} if shots is None else self.by_shots.get(shots, {})
        return replaced.get(name, self._mode[name] if value is None else value)

    def weights(self, shots: int | None = None) -> dict[str, float]:
        """What the reward adds up, each times its weight, for sequences of this many demonstrations: recorded fields,
        and `information` or `capped_information` (see `knobwise.envs.demonstrations.reward`)."""
        weights = {name: self._setting(name, shots) for name in self._mode}
        if self.mode == "legacy":
            return {"information": weights["alpha"], "vqa_correct": weights["beta"]}
        answer = {"vqa_correct": weights["hard_weight"], "vqa_acc_score": weights["soft_weight"]}
        if self.mode == "hybrid":
            alpha = weights["alpha"]
            return {"capped_information": alpha} | {name: (1 - alpha) * weight for name, weight in answer.items()}
        return answer

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals with a weight above 0 for some number of demonstrations."""
        every = [self.weights(shots) for shots in (None, *self.by_shots)]
        return tuple(name for name in every[0] if any(weights[name] for weights in every))

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that the reward of a sequence is computed from, names in `FIELDS`."""
        return tuple(self.information if name.endswith("information") else name for name in self.signals)


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


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
