"""The reward of a sequence of demonstrations: a weighted sum of signals, by a mode of `settings.py`.

In any mode the weights can depend on the number of demonstrations (`by_shots`) and on how much each signal still varies
inside a group (`adaptive`). The modes are those of the original selector and two that it planned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig

SPREAD = 1e-6  # a smaller standard deviation is rounding


def demonstration_reward(
    fields: Mapping[str, Tensor], lengths: Tensor, mask: Tensor, config: DemonstrationRewardConfig
) -> Tensor:
    """The rewards of the sequences of groups, not shuffled yet.

    Args:
        fields: float [*, G] by name, also `coherence` and `diversity` if the mode needs them; masked values may be NaN.
        lengths: int64 [*, G], demonstrations of each sequence.
        mask: bool [*, G], True where there is a sequence.

    Returns: float32 [*, G], 0 where masked. Raises InputError if a field that the mode needs is missing.
    """
    config = config.resolved(fields)
    for name in config.needs:
        if name not in fields:
            raise InputError(f"reward.mode={config.mode} needs {name}, which is not recorded; choose another mode")

    def signal(name: str) -> Tensor:
        match name:
            case "information":
                return fields[config.information]
            case "capped_information":
                return (config.information_scale * fields[config.information]).clamp_max(1.0)
            case "twice_correct":
                return 2 * fields["vqa_correct"]
            case "legacy_correct":
                return 2 * fields["vqa_correct"] - 1 if config.correctness == "pm1" else fields["vqa_correct"]
            case "relevance":
                return (1 - fields["vqa_correct"]) * fields["vqa_rel_score"]
        return fields[name]

    names, exists = config.signals, mask.unsqueeze(-1)
    values = torch.stack([signal(name).float() for name in names], -1).where(exists, 0.0)
    weights = values.new_tensor([config.weights()[name] for name in names]).expand_as(values)
    for shots in config.by_shots:
        replaced = values.new_tensor([config.weights(shots)[name] for name in names])
        weights = torch.where((lengths == shots).unsqueeze(-1), replaced, weights)
    if config.adaptive:
        count = exists.sum(-2, keepdim=True).clamp_min(1)
        centred = (values - values.sum(-2, keepdim=True) / count).where(exists, 0.0)
        spread = (centred.square().sum(-2, keepdim=True) / count).sqrt()
        share = weights * spread.where(spread > SPREAD, 0.0)
        total = share.sum(-1, keepdim=True)
        moved = weights.sum(-1, keepdim=True) * share / total.where(total > 0, 1.0)
        weights = torch.where(total > 0, moved, weights)
    return (weights * values).sum(-1)


def coherence_and_diversity(embeddings: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """How similar each demonstration is to the one before it, and how different they all are: embeddings float
    [*, T, d], anything finite after the end, and lengths int64 [*] → float [*] each.

    coherence = mean cosine of consecutive demonstrations, diversity = 1 − mean cosine of all pairs; both are 0 where
    there is only one demonstration. (The original design names both without defining them.)
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
    """The rewards [*, G] permuted among the existing sequences of each group (bool [*, G]); the others keep 0. The
    generator is on the CPU, so that a seed gives the same on every device."""
    keys = torch.rand(reward.shape, generator=generator).to(reward.device).masked_fill(~mask, 2.0)
    place = (~mask).int().argsort(dim=-1, stable=True)
    return torch.empty_like(reward).scatter(-1, place, reward.gather(-1, keys.argsort(-1)))
