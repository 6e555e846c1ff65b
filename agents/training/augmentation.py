"""What the actor sees in training beside the samples: copies of them on slower machines, with noisy
features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.problem import Problem
from knobwise.envs.tables.cells import Cells
from knobwise.envs.tables.drift import copies_of
from knobwise.envs.tables.profile_table import ProfileTable

MAX_NOISE = 1 << 24
"""Numbers that are drawn for `policy.augment`; in larger tables copies share them."""


class Copies(NamedTuple):
    """Samples and their copies, see `copies_of`."""

    table: ProfileTable
    """The samples, then their copies; the profile itself if there are none."""
    cells: Cells
    """What counts of it."""
    offsets: Tensor | None
    """Float [rows, C], how the machines drift, in ln ms; None without drift."""
    noise: Tensor | None
    """Float [*, width], what is added to the features of copies; None for nothing."""
    drift: float
    """The largest size of drift, in ln ms."""
    augment: float
    """The standard deviation of the noise; 0 without noise."""


def copies_for_training(
    problem: Problem, controller: Controller, policy: PolicyConfig, seed: int
) -> Copies:
    """Return the samples with the copies that `policy.drift` and `policy.augment` ask for."""
    drift = 0.0
    if problem.rule.late and len(controller.network.values):
        drift = policy.drift
    noisy = policy.augment > 0 and controller.normaliser.width > 0
    copied, cells, offsets = copies_of(problem.values, drift, noisy, seed, problem.cells)
    if not noisy or copied is problem.values:
        return Copies(copied, cells, offsets, None, drift, 0.0)
    count = min(copied.num_samples, MAX_NOISE // controller.normaliser.width)
    generator = torch.Generator().manual_seed(seed)
    noise = controller.normaliser.noise(policy.augment, max(count, 1), generator)
    return Copies(copied, cells, offsets, noise, drift, policy.augment)
