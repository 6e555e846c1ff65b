"""Choose which configurations to measure where a grid is too large to measure all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue


def sample_grid(
    values: Mapping[str, Sequence[KnobValue]], count: int = 0, seed: int = 0
) -> list[dict[str, KnobValue]]:
    """Choose `count` different configurations of the grid that these values span, or all for 0.

    They are spread evenly over all knobs at once, as a Latin hypercube (McKay et al. 1979); a point
    that falls on a configuration taken already goes to a free one at random. Equal arguments give
    equal choices.

    Args:
        values: the values of each knob by its name: names of modes in the order of their cost,
            numbers in any order.
        count: the number of configurations.
        seed: of the random choice.

    Returns:
        The configurations in the order of the grid, the last knob changing fastest.

    Raises:
        InputError: no knobs or values, a value twice, or a `count` larger than the grid.
    """
    if not values:
        raise InputError("a grid needs at least one knob")
    for name, knob_values in values.items():
        if not knob_values or len(set(knob_values)) < len(knob_values):
            raise InputError(
                f"{name} needs at least one value and no value twice, not {list(knob_values)}"
            )
    # configurations are numbered as in the whole grid
    sizes = [len(knob_values) for knob_values in values.values()]
    total = math.prod(sizes)
    if not 0 <= count <= total:
        raise InputError(
            f"knobs.count={count}: these values make {total} configurations; 0 takes all"
        )
    chosen = np.arange(total)
    if count not in (0, total):
        chosen = _latin_hypercube(sizes, count, np.random.default_rng(seed))
    ordered = []
    for knob_values in values.values():
        # numbers are sorted, names stand in the order of their cost already
        has_names = any(isinstance(value, str) for value in knob_values)
        ordered.append(knob_values if has_names else sorted(knob_values))
    configurations = list(itertools.product(*ordered))
    return [dict(zip(values, configurations[i], strict=True)) for i in chosen]


def _latin_hypercube(sizes: list[int], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw configurations by their number in the grid, in ascending order: int64 [count]."""
    from scipy.stats import qmc

    points = qmc.LatinHypercube(d=len(sizes), rng=rng).random(count)
    # the configuration that each point falls on
    wanted = np.ravel_multi_index(tuple((points * sizes).astype(np.int64).T), tuple(sizes))
    taken = np.unique(wanted)
    free = np.setdiff1d(np.arange(math.prod(sizes)), taken)
    # for points that fell on a configuration taken already
    others = rng.choice(free, count - len(taken), replace=False)
    return np.sort(np.concatenate([taken, others]))
