"""The reward of showing a sequence of demonstrations, in all modes of the original selector and two of its plans.

Every mode is a weighted sum of signals, so that weights can follow the number of demonstrations (`by_shots`) and what
still tells the sequences of a group apart (`adaptive`), whatever the mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn.functional import normalize

from knobwise.common.errors import InputError

MODES: dict[str, dict[str, float]] = {
    "legacy": {"alpha": 1.0, "beta": 0.0},
    "hard_plus_soft": {"hard_weight": 1.0, "soft_weight": 1.0},
    "hard_plus_soft_v2": {"hard_weight": 2.0, "soft_weight": 1.0},
    "separated": {"hard_weight": 1.0, "soft_weight": 1.0},
    "hard_only": {"hard_weight": 1.0},
    "soft_only": {"soft_weight": 1.0},
    "gtprob": {"hard_weight": 1.0, "soft_weight": 1.0},
    "gtprob_separated": {"hard_weight": 1.0, "soft_weight": 1.0},
    "gtprob_rel": {"hard_weight": 1.0, "soft_weight": 1.0, "rel_weight": 0.1},
    "hybrid": {"alpha": 0.5, "hard_weight": 1.0, "soft_weight": 0.5},
    "multi_level": {
        "beam_weight": 1.0,
        "sequence_weight": 0.5,
        "task_weight": 1.0,
        "coherence_weight": 0.5,
        "diversity_weight": 1.0,
    },
}
"""The modes, the weights that each has, and what they are unless set."""
SPREAD = 1e-6  # a smaller standard deviation is rounding


@dataclass
class DemonstrationRewardConfig:
    """The training signal of the selector. c = vqa_correct, a = vqa_acc_score, g = vqa_gt_prob, r = vqa_rel_score,
    i = information.

    A weight left at None is what the mode has in `MODES`; one that the mode does not have is refused.
    """

    mode: str = "hard_plus_soft_v2"
    """`legacy`: α·i + β·c · `hard_plus_soft`: h·c + s·a · `hard_plus_soft_v2`: the same with h = 2, so that every right
    answer is above every wrong one · `separated`: 2h·c + s·a · `hard_only`: h·c · `soft_only`: s·a · `gtprob`: h·c +
    s·g · `gtprob_separated`: 2h·c + s·g · `gtprob_rel`: h·c + s·g + ρ·(1 − c)·r · `hybrid`: α·min(1, scale·i) +
    (1 − α)(h·c + s·a) · `multi_level`: beam·i + sequence·(coherence + diversity, weighted) + task·a."""
    hard_weight: float | None = None
    """h, weight of a right answer."""
    soft_weight: float | None = None
    """s, weight of the soft accuracy, or of the probability of the true answer in the modes `gtprob…`."""
    alpha: float | None = None
    """α, weight of the information; in `hybrid` in [0, 1]."""
    beta: float | None = None
    """β, weight of the correctness in `legacy`."""
    rel_weight: float | None = None
    """ρ, weight of the relevance of a wrong answer."""
    beam_weight: float | None = None
    """Weight of the beam's level in `multi_level`: the information."""
    sequence_weight: float | None = None
    """Weight of the sequence's level: `coherence_weight`·coherence + `diversity_weight`·diversity."""
    task_weight: float | None = None
    """Weight of the task's level: the soft accuracy."""
    coherence_weight: float | None = None
    """Of coherence inside the sequence's level. Of two demonstrations coherence + diversity is 1, so equal weights say
    nothing about them."""
    diversity_weight: float | None = None
    """Of diversity inside the sequence's level."""
    correctness: str = "01"
    """Correctness in `legacy`: `01` is c, `pm1` is 2c − 1."""
    information: str = "beam_score"
    """i: `beam_score` (gain over no demonstration) or `logprob_score`."""
    information_scale: float = 10.0
    """What the information is multiplied by in `hybrid`."""
    by_shots: dict[int, dict[str, float]] = field(default_factory=dict)
    """Weights by name that replace the others' for sequences of so many demonstrations."""
    adaptive: bool = False
    """Inside each group the sum of the weights is shared out anew: to each signal in proportion to its weight times its
    standard deviation. A signal that no longer separates the sequences gives its weight to those that do."""
    shuffled: bool = False
    """A control: rewards are permuted inside each group, so there is nothing to learn."""

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, ...]] = {
            "mode": tuple(MODES),
            "correctness": ("01", "pm1"),
            "information": ("beam_score", "logprob_score"),
        }
        for name, values in known.items():
            if (value := getattr(self, name)) not in values:
                raise InputError(f"reward.{name}={value!r}: must be one of {', '.join(values)}")
        if not _finite(self.information_scale) or self.information_scale <= 0:
            raise InputError(f"reward.information_scale={self.information_scale!r}: must be a number > 0")
        try:
            self.by_shots = {int(shots): dict(weights) for shots, weights in self.by_shots.items()}
        except (TypeError, ValueError, AttributeError):
            raise InputError(
                f"reward.by_shots={self.by_shots!r}: must give weights by name for each number of demonstrations, as "
                "in {2: {hard_weight: 1.0}}"
            ) from None
        names = {f.name for f in fields(self) if f.name.endswith("_weight")} | {"alpha", "beta"}
        given = {"reward": {name: value for name in names if (value := getattr(self, name)) is not None}}
        given |= {f"reward.by_shots.{shots}": weights for shots, weights in self.by_shots.items()}
        for where, weights in given.items():
            for name, value in sorted(weights.items()):
                if name not in MODES[self.mode]:
                    raise InputError(
                        f"{where}.{name}: mode {self.mode} has no such weight, it has {', '.join(MODES[self.mode])}"
                    )
                if not _finite(value) or value < 0:
                    raise InputError(f"{where}.{name}={value!r}: must be a number ≥ 0")
        for shots in (None, *self.by_shots):
            if shots is not None and shots < 1:
                raise InputError(f"reward.by_shots.{shots}: a sequence has at least one demonstration")
            where = "reward" if shots is None else f"reward.by_shots.{shots}"
            if self.mode == "hybrid" and self._setting("alpha", shots) > 1:
                raise InputError(f"{where}.alpha={self._setting('alpha', shots)!r}: must be in [0, 1] in mode hybrid")
            if not any(self.weights(shots).values()):
                raise InputError(f"{where}: all weights of mode {self.mode} are 0, so every sequence has reward 0")

    def _setting(self, name: str, shots: int | None) -> float:
        own: float | None = getattr(self, name)
        return self.by_shots.get(shots or 0, {}).get(name, MODES[self.mode][name] if own is None else own)

    def weights(self, shots: int | None = None) -> dict[str, float]:
        """The weight of each signal of the mode, for sequences of so many demonstrations."""
        weight = {name: self._setting(name, shots) for name in MODES[self.mode]}
        if self.mode == "legacy":
            return {"information": weight["alpha"], "correct": weight["beta"]}
        if self.mode == "multi_level":
            return {
                "information": weight["beam_weight"],
                "coherence": weight["sequence_weight"] * weight["coherence_weight"],
                "diversity": weight["sequence_weight"] * weight["diversity_weight"],
                "soft": weight["task_weight"],
            }
        names = {"hard_weight": "correct", "soft_weight": "soft", "rel_weight": "relevance"}
        signals = {signal: weight[name] for name, signal in names.items() if name in weight}
        if self.mode == "hybrid":
            alpha = weight["alpha"]
            return {"information": alpha} | {name: (1 - alpha) * value for name, value in signals.items()}
        return signals

    @property
    def signals(self) -> tuple[str, ...]:
        """The signals that weigh anything, for some number of demonstrations."""
        every = [self.weights(shots) for shots in (None, *self.by_shots)]
        return tuple(name for name in every[0] if any(weights[name] for weights in every))

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of a sequence that its reward is made of, names of
        `knobwise.envs.demonstrations.beam_table.FIELDS`.
        """
        soft = "vqa_gt_prob" if self.mode.startswith("gtprob") else "vqa_acc_score"
        made_of = {
            "information": (self.information,),
            "correct": ("vqa_correct",),
            "soft": (soft,),
            "relevance": ("vqa_correct", "vqa_rel_score"),
        }
        return tuple(dict.fromkeys(name for signal in self.signals for name in made_of.get(signal, ())))

    @property
    def needs_embeddings(self) -> bool:
        """Whether coherence or diversity weighs anything."""
        return not {"coherence", "diversity"}.isdisjoint(self.signals)


def demonstration_reward(
    fields: Mapping[str, Tensor],
    lengths: Tensor,
    mask: Tensor,
    config: DemonstrationRewardConfig,
    coherence: Tensor | None = None,
    diversity: Tensor | None = None,
) -> Tensor:
    """The rewards of the sequences of groups, not shuffled yet.

    Args:
        fields: float [*, G] by name; what is masked may be NaN.
        lengths: int64 [*, G], demonstrations of each sequence.
        mask: bool [*, G], True where there is a sequence.
        config: mode and weights.
        coherence, diversity: float [*, G], see `coherence_and_diversity`; where the mode is made of them.

    Returns: float32 [*, G], 0 where masked.

    Raises:
        InputError: a field that the mode is made of is not there.
    """
    for name in config.needs:
        if name not in fields:
            raise InputError(f"reward.mode={config.mode} is made of {name}, which is not recorded; choose another mode")

    def signal(name: str) -> Tensor:
        if name == "information":
            information = fields[config.information]
            scaled = config.mode == "hybrid"
            return (config.information_scale * information).clamp_max(1.0) if scaled else information
        if name == "correct":
            correct = fields["vqa_correct"]
            if config.mode.endswith("separated"):
                return 2 * correct
            return 2 * correct - 1 if (config.mode, config.correctness) == ("legacy", "pm1") else correct
        if name == "soft":
            return fields["vqa_gt_prob" if config.mode.startswith("gtprob") else "vqa_acc_score"]
        if name == "relevance":
            return (1 - fields["vqa_correct"]) * fields["vqa_rel_score"]
        found = {"coherence": coherence, "diversity": diversity}[name]
        assert found is not None, f"{name} is not given"
        return found

    names, there = config.signals, mask.unsqueeze(-1)
    values = torch.stack([signal(name).float() for name in names], -1).where(there, 0.0)
    weights = values.new_tensor([config.weights()[name] for name in names]).expand_as(values)
    for shots in config.by_shots:
        own = values.new_tensor([config.weights(shots)[name] for name in names])
        weights = torch.where((lengths == shots).unsqueeze(-1), own, weights)
    if config.adaptive:
        count = there.sum(-2, keepdim=True).clamp_min(1)
        centred = (values - values.sum(-2, keepdim=True) / count).where(there, 0.0)
        spread = (centred.square().sum(-2, keepdim=True) / count).sqrt()
        share = weights * spread.where(spread > SPREAD, 0.0)
        total = share.sum(-1, keepdim=True)
        moved = weights.sum(-1, keepdim=True) * share / total.where(total > 0, 1.0)
        weights = torch.where(total > 0, moved, weights)
    return (weights * values).sum(-1)


def coherence_and_diversity(embeddings: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """How much each demonstration is like the one before it, and how unlike they are all together.

    coherence = mean cosine of consecutive demonstrations, diversity = 1 − mean cosine of all pairs; both are 0 where
    there is one demonstration only. (The original design asks for both at the sequence's level without defining them.)

    Args:
        embeddings: float [*, T, d] of the demonstrations; anything finite after the end.
        lengths: int64 [*].

    Returns: float [*] each.
    """
    places = torch.arange(embeddings.shape[-2], device=lengths.device)
    used = places < lengths.unsqueeze(-1)
    unit = normalize(embeddings, dim=-1).where(used.unsqueeze(-1), 0.0)
    steps = (unit[..., 1:, :] * unit[..., :-1, :]).sum(-1)
    coherence = steps.sum(-1) / (lengths - 1).clamp_min(1)
    # |Σ u|² counts every pair twice and every demonstration with itself
    twice = unit.sum(-2).square().sum(-1) - unit.square().sum((-1, -2))
    diversity = 1 - twice / (lengths * (lengths - 1)).clamp_min(1)
    return coherence, diversity.where(lengths > 1, 0.0)


def shuffle(reward: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """The rewards [*, G] permuted among the sequences of each group that exist (bool [*, G]); 0 stays where none is.

    The generator is one of the CPU, so that a seed gives the same on every device.
    """
    keys = torch.rand(reward.shape, generator=generator).to(reward.device).masked_fill(~mask, 2.0)
    place = (~mask).int().argsort(dim=-1, stable=True)
    return torch.empty_like(reward).scatter(-1, place, reward.gather(-1, keys.argsort(-1)))


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
