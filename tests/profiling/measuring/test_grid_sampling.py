"""Which configurations of a grid are taken: how many, none twice, and what each strategy promises."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.profiling.measuring.grid_sampling import STRATEGIES, sample_grid

BIG = {"max_crops": (2, 4, 6, 8, 10, 12), "top_k": (4, 8, 12, 16, 20, 24, 28, 32), "num_active_blocks": (8, 10, 12, 14)}


@st.composite
def grids(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    values = {f"knob {k}": draw(st.permutations(range(2, 2 + n))) for k, n in enumerate(sizes)}
    total = len(list(itertools.product(*values.values())))
    return values, draw(st.integers(1, total)), draw(st.integers(0, 2**32)), total


@settings(max_examples=60, deadline=None)
@given(grid=grids(), strategy=st.sampled_from(STRATEGIES[1:]))
def test_the_count_is_exact_and_the_draw_repeats(grid, strategy):
    values, count, seed, _ = grid
    chosen = sample_grid(values, strategy, count, seed)
    keys = [tuple(c.values()) for c in chosen]
    assert len(keys) == len(set(keys)) == count
    assert keys == sorted(keys)  # the order of the grid
    assert all(list(c) == list(values) and all(c[k] in values[k] for k in values) for c in chosen)
    assert chosen == sample_grid(values, strategy, count, seed)


@settings(max_examples=80, deadline=None)
@given(grid=grids())
def test_balanced_takes_every_value_of_a_knob_equally_often(grid):
    values, count, seed, _ = grid
    chosen = sample_grid(values, "balanced", count, seed)
    for knob, of_knob in values.items():
        times = Counter(c[knob] for c in chosen)
        counts = [times[value] for value in of_knob]
        assert max(counts) - min(counts) <= 1


def test_balanced_takes_no_configuration_twice_where_sizes_have_a_common_divisor():
    for values, count in ((BIG, 192), ({"a": (1, 2), "b": (3, 4)}, 4)):
        assert sample_grid(values, "balanced", count, 0) == sample_grid(values, "full", 0, 0)


@settings(max_examples=40, deadline=None)
@given(grid=grids())
def test_boundary_goes_from_the_corners_inwards(grid):
    values, count, seed, _ = grid

    def inside(configuration):
        return sum(min(values[k]) < v < max(values[k]) for k, v in configuration.items())

    every = sorted(inside(c) for c in sample_grid(values, "full", 0, seed))
    assert sorted(inside(c) for c in sample_grid(values, "boundary", count, seed)) == every[:count]


@settings(max_examples=40, deadline=None)
@given(grid=grids())
def test_stratified_takes_as_many_of_each_combination_of_halves(grid):
    values, count, seed, _ = grid

    def halves(configuration):  # of an odd number the one in the middle is in the lower half
        return tuple(2 * sorted(values[k]).index(v) >= len(values[k]) for k, v in configuration.items())

    there = Counter(map(halves, sample_grid(values, "full", 0, seed)))
    taken = Counter(map(halves, sample_grid(values, "stratified", count, seed)))
    most = max(taken.values())
    for stratum, size in there.items():
        assert taken[stratum] >= min(size, most - 1)


def test_full_is_the_whole_grid_in_its_order():
    found = sample_grid({"a": (2, 1), "b": (5,), "c": (3, 4)}, "full", 0, 7)
    assert [tuple(c.values()) for c in found] == [(1, 5, 3), (1, 5, 4), (2, 5, 3), (2, 5, 4)]
    assert found == sample_grid({"a": (2, 1), "b": (5,), "c": (3, 4)}, "full", 4, 0)


def test_a_latin_hypercube_spreads_over_every_knob():
    chosen = sample_grid(BIG, "latin_hypercube", 24, 3)
    for knob, of_knob in BIG.items():
        times = Counter(c[knob] for c in chosen)
        # 24 points are 24/n in each of n values; only a point that fell on another's place may have moved away
        assert all(abs(times[value] - 24 / len(of_knob)) <= 2 for value in of_knob)


def test_another_seed_draws_others():
    for strategy in STRATEGIES[1:]:
        assert sample_grid(BIG, strategy, 20, 0) != sample_grid(BIG, strategy, 20, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": (1, 2)}, "sobol", 1, 0), "strategy='sobol' is unknown; known are full"),
        (({}, "full", 0, 0), "at least one knob"),
        (({"a": ()}, "full", 0, 0), "a needs at least one value"),
        (({"a": (1, 1)}, "full", 0, 0), "no value twice"),
        (({"a": (1, 2)}, "full", 1, 0), "takes all 2"),
        (({"a": (1, 2)}, "balanced", 3, 0), "takes 1 to 2"),
        (({"a": (1, 2)}, "boundary", 0, 0), "takes 1 to 2"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        sample_grid(*arguments)
