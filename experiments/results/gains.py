"""What GRPO added to the deployed policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from knobwise.agents.checkpoint import Loaded
from knobwise.experiments.results.statistics import mean_intervals


def gain_on_held_out(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """Return what GRPO added on the samples that were held out in training, as `grpo_gain` has it;
    {} where there was no GRPO, or no warm-up before it.

    It is the difference, sample by sample, between the weights that are kept and those that GRPO
    started with, of networks that were not fitted on the sample.
    """
    scores = [each.extra.get("grpo_held_out") or {} for each in loaded]
    if not all(scores):
        return {}
    gains = torch.stack([each["best"].double() - each["start"].double() for each in scores])
    return gain("held_out", gains.numpy())


def gain(where: str, gains: np.ndarray) -> dict[str, Any]:
    """Return the mean of differences [S, n] over seeds and samples, and its 95 % interval."""
    return {where: float(gains.mean()), f"{where}_ci95": mean_intervals([gains])[0]}
