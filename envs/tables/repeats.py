"""Cells that were measured repeatedly: their median, and checks of their measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from knobwise.common.errors import InputError


def median_of(repeats_ms: Tensor) -> Tensor:
    """Compute the median of each cell's measurements, [*, R] → [*].

    It is the mean of the middle two where their number is even. NaN stands for no measurement.
    """
    ordered = repeats_ms.sort(-1).values  # NaN last
    count = (~ordered.isnan()).sum(-1, keepdim=True)
    low = ((count - 1) // 2).clamp_min(0)
    high = (count // 2).clamp_max(ordered.shape[-1] - 1)
    return torch.lerp(ordered.gather(-1, low), ordered.gather(-1, high), 0.5).squeeze(-1)


def check_repeats(table: str, repeats_ms: Tensor, latency_ms: Tensor) -> None:
    """Raise InputError unless the latencies [N, C] are the medians of the measurements [N, C, R].

    Measurements must be finite and not negative, and NaN only after the last of a cell.
    """
    # in pieces, because a table mapped from a file may be larger than the memory
    for repeats, median in zip(repeats_ms.split(1 << 16), latency_ms.split(1 << 16), strict=True):
        # finite, not negative, without gaps
        missing = repeats.isnan()
        gaps = missing[..., :-1] & ~missing[..., 1:]
        if bool(gaps.any() | (repeats < 0).any() | repeats.isinf().any()):
            raise InputError(
                f"{table}: repeats_ms must be finite, not negative, and NaN only after the last "
                "measurement of a cell"
            )
        wrong = ~torch.isclose(median_of(repeats), median, rtol=1e-5, atol=0.0, equal_nan=True)
        if wrong.any():
            raise InputError(
                f"{table}: in {int(wrong.sum())} cells latency_ms is not the median of "
                "repeats_ms. Set latency_ms=median_of(repeats_ms)"
            )
