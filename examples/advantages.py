"""Advantages of your own for GRPO: `loss.advantage=examples.advantages:leave_one_out`.

knobwise train -m experiment=advantages loss.advantage=centred,examples.advantages:leave_one_out
seeds=[0,1,2]
"""

import torch
from torch import Tensor


def leave_one_out(reward: Tensor, weight: Tensor | None) -> Tensor:
    """Compare each draw with the mean of the others (RLOO, Ahmadian et al. 2024, equation 8).

    Args:
        reward: [*, G], the group is the last axis.
        weight: [*, G], the share of each draw in its group; None for 1/G.
    """
    if weight is None:
        share = torch.full_like(reward, 1 / reward.shape[-1])
    else:
        share = weight
    mean = (share * reward).sum(-1, keepdim=True)
    return (reward - mean) / (1 - share).clamp_min(1e-3)
