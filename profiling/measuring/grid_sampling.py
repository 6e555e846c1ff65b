"""Which configurations of a grid too large to measure are measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError

Grid = NDArray[np.int64]
"""[C, K]: for each configuration the place of each knob's value among that knob's values."""


def sample_grid(values: Mapping[str, Sequence[Any]], strategy: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Choose `count` different configurations of the grid that these values span; the same ones for the same arguments.

    - `full`: all of them; `count` is 0 or their number.
    - `stratified`: the values of each knob are halved, lower and upper, and each combination of halves gets its share,
      the same for all to within one as long as it has configurations left; which ones is drawn.
    - `boundary`: corners first (every knob at its least or greatest value), then edges (all knobs but one), and so on
      inwards; among equals drawn.
    - `balanced`: every value of every knob equally often, to within one.
    - `latin_hypercube`: evenly spread over all knobs at once (McKay et al. 1979); a point that falls on a configuration
      taken already goes to the nearest free one.

    The values of each knob are by its name: names of modes in the order of their cost, numbers in any order. The
    configurations are in the order of the grid, the last knob changing fastest. Raises InputError for no knobs or
    values, a value given twice, more than there are, none.
    """
    if not values:
        raise InputError("a grid needs at least one knob")
    for name, of_knob in values.items():
        if not of_knob or len(set(of_knob)) < len(of_knob):
            raise InputError(f"{name} needs at least one value and no value twice, not {list(of_knob)}")
    sizes = [len(of_knob) for of_knob in values.values()]
    total = math.prod(sizes)
    if strategy == "full":
        if count not in (0, total):
            raise InputError(f"count={count}: strategy=full takes all {total} configurations; choose another strategy")
        count = total
    if not 1 <= count <= total:
        raise InputError(f"count={count}: strategy={strategy} takes 1 to {total} configurations of these values")
    grid = np.indices(sizes).reshape(len(sizes), total).T
    chosen = _CHOOSE[strategy](grid, sizes, count, np.random.default_rng(seed))
    # numbers have their place by size, whatever their order in `values`
    ordered = [v if any(isinstance(value, str) for value in v) else sorted(v) for v in values.values()]
    configurations = list(itertools.product(*ordered))
    return [dict(zip(values, configurations[i], strict=True)) for i in np.sort(chosen)]


def _stratified(grid: Grid, sizes: list[int], count: int, rng: np.random.Generator) -> Grid:
    halves = (2 * grid >= np.array(sizes)).astype(np.int64)
    stratum = np.unique(halves, axis=0, return_inverse=True)[1].ravel()
    shuffled = rng.permutation(len(grid))
    turn = np.empty(len(grid), np.int64)  # the how-manieth of its stratum that a configuration is
    for s in range(stratum.max() + 1):
        members = shuffled[stratum[shuffled] == s]
        turn[members] = np.arange(len(members))
    # in every turn each stratum gives one; which strata give in the last, unfinished turn is drawn
    order = np.lexsort((rng.permutation(stratum.max() + 1)[stratum], turn))
    return order[:count]


def _boundary(grid: Grid, sizes: list[int], count: int, rng: np.random.Generator) -> Grid:
    inside = ((grid > 0) & (grid < np.array(sizes) - 1)).sum(1)
    return np.lexsort((rng.permutation(len(grid)), inside))[:count]


def _balanced(grid: Grid, sizes: list[int], count: int, rng: np.random.Generator) -> Grid:
    """The first `count` of an order of all configurations of which every beginning is balanced.

    Two knobs of n and m values: in step t take value t mod n of the one and t + ⌊t / lcm(n, m)⌋ mod m of the other.
    Both run round and round, and the shift after each lcm(n, m) steps keeps the pairs apart until all n·m have come.
    The pairs, in this order, run round beside the third knob in the same way.
    """
    knobs = rng.permutation(len(sizes))
    order = np.zeros((1, 0), np.int64)
    for k in knobs:
        m, n = sizes[k], len(order)
        t = np.arange(n * m)
        value = rng.permutation(m)[(t + t // math.lcm(n, m)) % m]
        order = np.column_stack([order[t % n], value])
    places = np.empty_like(order)
    places[:, knobs] = order
    return np.ravel_multi_index(tuple(places[:count].T), tuple(sizes))


def _latin_hypercube(grid: Grid, sizes: list[int], count: int, rng: np.random.Generator) -> Grid:
    from scipy.stats import qmc

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


_CHOOSE: dict[str, Callable[[Grid, list[int], int, np.random.Generator], Grid]] = {
    "full": lambda grid, *_: np.arange(len(grid)),
    "stratified": _stratified,
    "boundary": _boundary,
    "balanced": _balanced,
    "latin_hypercube": _latin_hypercube,
}
STRATEGIES = tuple(_CHOOSE)
