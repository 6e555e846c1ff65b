"""Which configurations of a grid too large to measure are measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError


def sample_grid(
    values: Mapping[str, Sequence[Any]], count: int = 0, seed: int = 0
) -> list[dict[str, Any]]:
    """Choose `count` different configurations of the grid that these values span, or all for 0; the
    same ones for the same arguments. They are spread evenly over all knobs at once, as a Latin
    hypercube (McKay et al. 1979); a point that falls on a configuration taken already goes to the
    nearest free one.

    The values of each knob are by its name: names of modes in the order of their cost, numbers in
    any order. The configurations are in the order of the grid, the last knob changing fastest.
    Raises InputError for no knobs or values, a value given twice, more than there are.
    """
    if not values:
        raise InputError("a grid needs at least one knob")
    for name, of_knob in values.items():
        if not of_knob or len(set(of_knob)) < len(of_knob):
            raise InputError(
                f"{name} needs at least one value and no value twice, not {list(of_knob)}"
            )
    sizes = [len(of_knob) for of_knob in values.values()]
    total = math.prod(sizes)
    if not 0 <= count <= total:
        raise InputError(
            f"knobs.count={count}: these values make {total} configurations; 0 takes all"
        )
    all_of_them = count in (0, total)
    if all_of_them:
        chosen = np.arange(total)
    else:
        chosen = _latin_hypercube(sizes, count, np.random.default_rng(seed))
    # numbers have their place by size, whatever their order in `values`
    ordered = [
        v if any(isinstance(value, str) for value in v) else sorted(v) for v in values.values()
    ]
    configurations = list(itertools.product(*ordered))
    return [dict(zip(values, configurations[i], strict=True)) for i in np.sort(chosen)]


def _latin_hypercube(sizes: list[int], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Numbers of configurations in the order of the grid, int64 [count]."""
    from scipy.stats import qmc

    grid = np.indices(sizes).reshape(len(sizes), -1).T  # [C, K]
    points = qmc.LatinHypercube(d=len(sizes), rng=rng).random(count)
    middles = (grid + 0.5) / np.array(sizes)
    wanted = np.ravel_multi_index(tuple((points * sizes).astype(np.int64).T), tuple(sizes))
    taken, first = np.unique(wanted, return_index=True)
    free = np.ones(len(grid), bool)
    free[taken] = False
    for point in np.delete(points, first, axis=0):
        distance = np.where(free, ((middles - point) ** 2).sum(1), np.inf)
        free[distance.argmin()] = False
    return np.flatnonzero(~free)
