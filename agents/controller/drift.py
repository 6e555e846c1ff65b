"""What a network is told of drift: for each knob value how much slower it is than in the profile.

`envs.tables.drift` says what drift is, and makes the copies of samples on which a network learns to
use these inputs. Without drift they are 0, and where `policy.drift=0` there are none.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_VALUES = 64
"""With more knob values heads are not told their drift."""
DRIFT_SCALE = 5.0
"""Factor on offsets, so that they are of the size of the other inputs."""


def drift_values(configurations: Tensor, drift: float) -> Tensor:
    """Return the matrix [V, C] that turns offsets of configurations into offsets of knob values.

    The offset of a knob value is the mean over its configurations, less the mean over all. V is 0
    where heads know no drift.
    """
    count = len(configurations)
    rows = []
    for values in configurations.T:
        kinds = values.unique()
        if len(kinds) > 1:
            for kind in kinds:
                same = values == kind
                rows.append(same.float() / same.sum() - 1 / count)
    if not drift or not rows or len(rows) > MAX_VALUES:
        return torch.zeros(0, count)
    return torch.stack(rows)


def drift_inputs(offset: Tensor, values: Tensor) -> Tensor:
    """Return what heads read of offsets of ln ms: [*, C] and `drift_values` [V, C] → [*, V]."""
    return DRIFT_SCALE * (offset @ values.T)
