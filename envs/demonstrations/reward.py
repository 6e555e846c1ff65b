"""The reward of a sequence of demonstrations: a weighted sum of signals.

A mode of `settings.py` chooses the signals. Their weights can depend on the number of
demonstrations, and on how much each signal varies inside a group. The modes are those of the
original selector and those that it planned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig

INFORMATION_SCALE = 10.0
"""Under `hybrid` an information gain of 1/10 counts as much as a right answer."""
MIN_SPREAD = 1e-6
"""A smaller standard deviation counts as rounding, and so as 0."""


def demonstration_reward(
    fields: Mapping[str, Tensor], lengths: Tensor, mask: Tensor, config: DemonstrationRewardConfig
) -> Tensor:
    """Compute the reward of each sequence of each group, before any `shuffle`.

    Args:
        fields: float [*, G] by name: all that the mode needs, `coherence` and `diversity` included.
            Masked values may be NaN.
        lengths: int64 [*, G], demonstrations in each sequence.
        mask: bool [*, G], True where there is a sequence.

    Returns: float32 [*, G], 0 where masked.
    """
    config = config.resolved(fields)
    exists = mask.unsqueeze(-1)
    # a mode without information may lack its field
    information = fields.get(config.information, torch.empty(0)).float()
    computed = {
        "information": information,
        "capped_information": (INFORMATION_SCALE * information).clamp_max(1.0),
    }
    known = {**fields, **computed}
    # [*, G, K], 0 where there is no sequence
    signals = [known[name].float() for name in config.signal_names]
    values = torch.stack(signals, -1).where(exists, 0.0)

    def factors(shots: int | None = None) -> Tensor:
        # [K], for sequences of so many demonstrations
        signals = config.signals(shots)
        return values.new_tensor([signals[name] for name in config.signal_names])

    weights = factors().expand_as(values)
    # sequences of some lengths have weights of their own
    for shots in config.by_shots:
        weights = factors(shots).where((lengths == shots).unsqueeze(-1), weights)
    if config.adaptive:
        weights = adapt_weights(weights, values, exists)
    return (values * weights).sum(-1)


def adapt_weights(weights: Tensor, values: Tensor, exists: Tensor) -> Tensor:
    """Give more weight to signals that vary more inside the group, and none to constant ones.

    The new weights are proportional to weight × standard deviation. Their sum stays the same.

    Args:
        weights, values: float [*, G, K], of K signals.
        exists: bool [*, G, 1], True where there is a sequence.

    Returns: [*, G, K]; where no signal varies, the weights as they were.
    """
    count = exists.sum(-2, keepdim=True).clamp_min(1)
    # standard deviation inside the group
    centred = (values - values.sum(-2, keepdim=True) / count).where(exists, 0.0)
    spread = (centred.square().sum(-2, keepdim=True) / count).sqrt()
    scaled = weights * spread.where(spread > MIN_SPREAD, 0.0)
    total = scaled.sum(-1, keepdim=True)
    same_sum = weights.sum(-1, keepdim=True) * scaled / total.where(total > 0, 1.0)
    return torch.where(total > 0, same_sum, weights)


def coherence_and_diversity(embeddings: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Compute how alike consecutive demonstrations are, and how different all of them are.

    Coherence is the mean cosine of consecutive demonstrations, diversity 1 − the mean cosine of all
    pairs. Both are 0 for a single demonstration. (The original design names both without a
    formula.)

    Args:
        embeddings: float [*, T, d], anything finite after the end of a sequence.
        lengths: int64 [*], demonstrations in each sequence.

    Returns: float [*] each.
    """
    used = torch.arange(embeddings.shape[-2], device=lengths.device) < lengths.unsqueeze(-1)
    directions = normalize(embeddings, dim=-1).where(used.unsqueeze(-1), 0.0)
    consecutive = (directions[..., 1:, :] * directions[..., :-1, :]).sum((-1, -2))
    coherence = consecutive / (lengths - 1).clamp_min(1)
    # the square of the sum holds every pair twice, and every demonstration with itself
    pairs_twice = directions.sum(-2).square().sum(-1) - directions.square().sum((-1, -2))
    diversity = 1 - pairs_twice / (lengths * (lengths - 1)).clamp_min(1)
    return coherence, diversity.where(lengths > 1, 0.0)


def shuffle(reward: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """Permute the rewards, float [*, G], among the sequences of each group that exist.

    `mask`, bool [*, G], is True where a sequence exists; the reward 0 of the others stays. The
    generator is on the CPU, so that a seed gives the same on every device.
    """
    # a random order of the rewards; sequences that do not exist have the largest keys and come last
    keys = torch.rand(reward.shape, generator=generator).to(reward.device).masked_fill(~mask, 2.0)
    drawn = reward.gather(-1, keys.argsort(-1))
    # the places to put them: those of existing sequences come first
    place = (~mask).int().argsort(dim=-1, stable=True)
    return torch.empty_like(reward).scatter(-1, place, drawn)
