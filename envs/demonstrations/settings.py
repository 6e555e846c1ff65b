"""The settings of demonstration rewards and groups, and the names in beam data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from knobwise.common.checks import one_of, share
from knobwise.common.errors import InputError

FIELDS = (
    "beam_score",
    "logprob_score",
    "vqa_correct",
    "vqa_acc_score",
    "vqa_gt_prob",
    "vqa_rel_score",
)
"""Outcomes that can be recorded for a beam: information gain, log-probability of the answer, right
or wrong (0 or 1), soft accuracy, probability of the true answer, relevance."""
METHODS = ("beam", "sample", "retrieval", "random", "policy")
"""The ways in which a beam can be found. Only `beam` looks at the answer."""
GROUPS = {"all": METHODS, "without_beams": METHODS[1:], "own": ("policy",), "beams": ("beam",)}
"""The methods of a group, by its name. Those of `without_beams` do not look at the answer; `own`
holds only draws of a policy."""

SIGNALS = {
    "alpha": "information",
    "beta": "vqa_correct",
    "hard_weight": "vqa_correct",
    "soft_weight": "vqa_acc_score",
    "beam_weight": "information",
    "coherence_weight": "coherence",
    "diversity_weight": "diversity",
    "task_weight": "vqa_acc_score",
}
"""The signal that each weight is for.

A signal is a name in `FIELDS` or one of those that `knobwise.envs.demonstrations.reward`
computes."""
MODES: dict[str, dict[str, float]] = {
    "legacy": {"alpha": 1.0, "beta": 0.0},
    "hard_plus_soft": {"hard_weight": 1.0, "soft_weight": 1.0},
    "hard_plus_soft_v2": {"hard_weight": 2.0, "soft_weight": 1.0},
    "hybrid": {"alpha": 0.5, "hard_weight": 1.0, "soft_weight": 0.5},
    "multi_level": {
        "beam_weight": 1.0,
        "coherence_weight": 0.25,
        "diversity_weight": 0.5,
        "task_weight": 1.0,
    },
}
"""The weights that each mode has, with their defaults."""
LEVELS = ("coherence", "diversity")
"""Signals that are computed from the embeddings of a sequence."""
AUTO = "auto"
"""The default mode: the mode follows from what was recorded."""
USUAL = "hard_plus_soft_v2"
"""The mode of `auto`, unless only scores were recorded."""


@dataclass
class DemonstrationRewardConfig:
    """The training signal of the selector. c = vqa_correct, a = vqa_acc_score, i = information.

    A weight of None takes the default of the mode, in `MODES`. A weight that the mode does not
    have is refused.
    """

    mode: str = AUTO
    """`auto`: `hard_plus_soft_v2`, or `legacy` if only scores were recorded, no right answers ·
    `legacy`: α·i + β·c · `hard_plus_soft`: h·c + s·a · `hard_plus_soft_v2`: the same with h = 2, so
    that every right answer is above every wrong one · `hybrid`: α·min(1, 10·i) + (1 − α)·(h·c +
    s·a) · `multi_level`: the beam (i), the sequence (coherence and diversity of its demonstrations)
    and the task (a), weighted."""
    hard_weight: float | None = None
    """h, weight of a right answer."""
    soft_weight: float | None = None
    """s, weight of the soft accuracy."""
    alpha: float | None = None
    """α, weight of the information; under `hybrid` from 0 to 1. Under `auto` it is for beams that
    only have scores."""
    beta: float | None = None
    """β, weight of a right answer under `legacy`."""
    beam_weight: float | None = None
    """Weight of the information under `multi_level`."""
    coherence_weight: float | None = None
    """Weight of the mean cosine of consecutive demonstrations, under `multi_level`."""
    diversity_weight: float | None = None
    """Weight of 1 − the mean cosine of all pairs of demonstrations, under `multi_level`."""
    task_weight: float | None = None
    """Weight of the soft accuracy under `multi_level`."""
    by_shots: dict[Any, Any] = field(default_factory=dict)
    """Weights that replace the others, for sequences of a given number of demonstrations: {2:
    {hard_weight: 3}}."""
    adaptive: bool = False
    """Divide the sum of the weights anew inside each group. Each signal gets a share in proportion
    to its weight times its standard deviation. A signal that no longer separates the sequences of a
    group so gives its weight to those that do."""
    information: str = "beam_score"
    """i: `beam_score` (gain over no demonstration), `logprob_score`, or another outcome that was
    recorded."""
    shuffled: bool = False
    """A control: rewards are permuted inside each group, so that there is nothing to learn."""

    def __post_init__(self) -> None:
        one_of("reward.mode", self.mode, (AUTO, *MODES))
        one_of("reward.information", self.information, FIELDS)
        self._check_weights("reward", self._weights)
        for shots, weights in self.by_shots.items():
            key = f"reward.by_shots.{shots}"
            if not (isinstance(shots, int) and shots >= 1 and isinstance(weights, Mapping)):
                raise InputError(
                    f"{key}={weights!r}: must be weights by number of demonstrations, as in "
                    "{2: {hard_weight: 3}}"
                )
            self._check_weights(key, weights, shots)

    def _check_weights(
        self, key: str, weights: Mapping[str, Any], shots: int | None = None
    ) -> None:
        """Raise InputError, with the setting's name `key`, if weights do not fit the mode."""
        known = MODES[self._mode]
        if self.mode == AUTO:
            # the beams tell which of two modes it is; that mode checks again
            known = MODES["legacy"] | known
        for name, weight in weights.items():
            if name not in known or not isinstance(weight, int | float) or not weight >= 0:
                raise InputError(
                    f"{key}.{name}={weight!r}: must be a number from 0; the weights of mode "
                    f"{self.mode} are {', '.join(known)}"
                )
            if self.mode == "hybrid" and name == "alpha":
                share(f"{key}.alpha", weight)
        if not any(self.signals(shots).values()):
            raise InputError(
                f"{key}: all weights of mode {self.mode} are 0; give one that is above 0"
            )

    @property
    def _weights(self) -> dict[str, float]:
        """The weights that are set, whatever the mode."""
        values = {name: getattr(self, name) for name in SIGNALS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _mode(self) -> str:
        """The mode; `USUAL` for `auto`."""
        return USUAL if self.mode == AUTO else self.mode

    def resolved(self, recorded: Collection[str]) -> DemonstrationRewardConfig:
        """Return the settings with `auto` replaced by the mode for beams that have these fields."""
        if self.mode != AUTO:
            return self
        answers = {"vqa_correct", "vqa_acc_score"}
        if self.information in recorded and answers.isdisjoint(recorded):
            return replace(self, mode="legacy")
        return replace(self, mode=USUAL)

    def signals(self, shots: int | None = None) -> dict[str, float]:
        """Return the factor of each signal. The reward of a sequence is the sum of signal × factor.

        `shots` is the number of demonstrations; None for a number that `by_shots` does not name.
        """
        weights = MODES[self._mode] | self._weights | self.by_shots.get(shots, {})
        if self._mode != "hybrid":
            return {SIGNALS[name]: weight for name, weight in weights.items()}
        # the information has the factor α, and the answer the rest of 1
        alpha = weights.pop("alpha")
        answer = {SIGNALS[name]: (1 - alpha) * weight for name, weight in weights.items()}
        return {"capped_information": alpha, **answer}

    @property
    def signal_names(self) -> tuple[str, ...]:
        """The signals with a factor above 0 for some number of demonstrations."""
        every = [self.signals(shots) for shots in (None, *self.by_shots)]
        names = []
        for name in every[0]:
            if any(signals[name] for signals in every):
                names.append(name)
        return tuple(names)

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that must be recorded, names in `FIELDS`."""
        names = [
            self.information if name.endswith("information") else name for name in self.signal_names
        ]
        return tuple(name for name in names if name not in LEVELS)


@dataclass
class GroupConfig:
    """The recorded sequences of a query that form its group."""

    methods: str = "all"
    """A name in `GROUPS`."""
    rounds: int | None = None
    """Keep draws of a policy from only this many latest rounds; None keeps all."""

    def __post_init__(self) -> None:
        one_of("groups.methods", self.methods, GROUPS)
