"""Group-relative advantages: how much better an alternative is than its group, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.losses.functional import even_weight, expectation
from knobwise.losses.settings import ADVANTAGES


def group_advantage(
    reward: Tensor,
    kind: str = "zscore",
    *,
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    std_floor: float = 0.1,
    clip: float = 5.0,
) -> Tensor:
    """Advantages inside each group.

    `unnormalised`: A = r, without a baseline. `centred`: A = r − E r. `zscore`: A = (r − E r)/max(std, std_floor), the
    form of GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1.1) with a floor, so that where all rewards of a group
    are equal but for noise the noise is not blown up to unit size. `rank`: the share of the group that is worse minus
    the share that is better; for draws 1 − 2·rank/(G − 1), ties in the middle.

    Args:
        reward: [*, J], the group is the last axis.
        kind: one of `ADVANTAGES`.
        weight: [*, J], sums to 1; None for draws, 1/J each. Alternatives of weight 0 do not touch the others.
        mask: bool [*, J], which draws there are, in the place of weights; the others do not touch them.
        std_floor: smallest standard deviation divided by, in units of reward.
        clip: advantages are cut to ±clip.

    Returns: [*, J], not differentiable.

    Raises:
        ValueError: another kind.
    """
    reward, weight = reward.detach(), weight if mask is None else even_weight(mask)
    if kind == "rank":
        worse = (reward.unsqueeze(-1) > reward.unsqueeze(-2)).to(reward.dtype)
        sign = worse - worse.transpose(-1, -2)
        if mask is not None:
            advantage = (sign * mask.unsqueeze(-2)).sum(-1) / (mask.sum(-1, keepdim=True) - 1).clamp_min(1)
        else:
            others = max(reward.shape[-1] - 1, 1)
            advantage = sign.sum(-1) / others if weight is None else (sign * weight.unsqueeze(-2)).sum(-1)
    elif kind in ("zscore", "centred"):
        advantage = reward - expectation(reward, weight).unsqueeze(-1)
        if kind == "zscore":
            advantage = advantage / expectation(advantage.square(), weight).sqrt().clamp_min(std_floor).unsqueeze(-1)
    elif kind == "unnormalised":
        advantage = reward
    else:
        raise ValueError(f"advantage {kind!r}: must be one of {', '.join(ADVANTAGES)}")
    return torch.clamp(advantage, -clip, clip)
