"""Decisions for many requests, a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

AT_ONCE = 1 << 14
"""Requests that are decided together, so that many of them need little memory."""


def in_parts(
    choose: Callable[..., Tensor], features: Mapping[str, Tensor], limits: Tensor, mask: Tensor | None
) -> Tensor:
    """What `choose(features, limits, mask)` gives for many requests, part by part."""
    parts = [slice(first, first + AT_ONCE) for first in range(0, len(limits), AT_ONCE)]
    blocks = [{name: block[part] for name, block in features.items()} for part in parts]
    masks = [None if mask is None else mask[part] for part in parts]
    chosen = [choose(b, limits[part], m) for b, part, m in zip(blocks, parts, masks, strict=True)]
    return torch.cat(chosen)
