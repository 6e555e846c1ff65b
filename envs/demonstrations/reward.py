"""The reward of a sequence of demonstrations: a weighted sum of what was recorded, by a mode of `settings.py`. The
modes are those of the original selector and the one that it planned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig


def demonstration_reward(fields: Mapping[str, Tensor], mask: Tensor, config: DemonstrationRewardConfig) -> Tensor:
    """The rewards of the sequences of groups, not shuffled yet.

    Args:
        fields: float [*, G] by name; masked values may be NaN.
        mask: bool [*, G], True where there is a sequence.

    Returns: float32 [*, G], 0 where masked. Raises InputError if a field that the mode needs is missing.
    """
    config = config.resolved(fields)
    for name in config.weights:
        if name not in fields:
            raise InputError(f"reward.mode={config.mode} needs {name}, which is not recorded; choose another mode")
    values = torch.stack([fields[name].float() for name in config.weights], -1).where(mask.unsqueeze(-1), 0.0)
    return (values * values.new_tensor([*config.weights.values()])).sum(-1)


def shuffle(reward: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """The rewards [*, G] permuted among the existing sequences of each group (bool [*, G]); the others keep 0. The
    generator is on the CPU, so that a seed gives the same on every device."""
    keys = torch.rand(reward.shape, generator=generator).to(reward.device).masked_fill(~mask, 2.0)
    place = (~mask).int().argsort(dim=-1, stable=True)
    return torch.empty_like(reward).scatter(-1, place, reward.gather(-1, keys.argsort(-1)))
