"""Advantages of your own for GRPO: `loss.advantage=examples.advantages:below_best`.

knobwise train -m experiment=advantages loss.advantage=centred,examples.advantages:below_best
seeds=[0,1,2] baselines=false
"""

import torch
from torch import Tensor


def below_best(reward: Tensor, weight: Tensor | None) -> Tensor:
    """Compare each draw with the best of its group, so that the best is left alone and all others
    become less likely.

    Args:
        reward: [*, G], the group is the last axis.
        weight: [*, G], the share of each draw in its group; None for 1/G.
    """
    drawn = reward
    if weight is not None:
        drawn = reward.masked_fill(weight == 0, -torch.inf)
    return reward - drawn.amax(-1, keepdim=True)


def leave_one_out(reward: Tensor, weight: Tensor | None) -> Tensor:
    """Compare each draw with the mean of the others (RLOO, Ahmadian et al. 2024, equation 8).

    Of equal weights that is `centred` times G/(G − 1). Arguments are those of `below_best`.
    """
    if weight is None:
        share = torch.full_like(reward, 1 / reward.shape[-1])
    else:
        share = weight
    mean = (share * reward).sum(-1, keepdim=True)
    return (reward - mean) / (1 - share).clamp_min(1e-3)
