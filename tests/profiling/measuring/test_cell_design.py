"""Which cells of a profile to measure."""

import itertools

import numpy as np
import torch
from helpers import small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.profiling.measuring.cell_design import (
    AT_RANDOM,
    CellDesign,
    balanced_cells,
    inverse_weights,
    with_cells,
)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_a_design_is_balanced_and_more_cells_include_fewer(samples, count, most, seed):
    most = min(most, count)
    cells = balanced_cells(samples, count, most, seed)
    assert cells.sum(1).tolist() == [most] * samples
    # each configuration once more than another at most in each position of a square
    whole = samples // count * count
    assert set(cells[:whole].sum(0).tolist()) <= {whole // count * most}
    fewer = balanced_cells(samples, count, max(1, most - 1), seed)
    assert not (fewer & ~cells).any()
    assert torch.equal(cells, balanced_cells(samples, count, most, seed))


def test_every_cell_is_as_likely():
    drawn = sum(balanced_cells(5, 4, 1, seed).double() for seed in range(2000))
    assert (drawn / 2000 - 0.25).abs().max() < 0.05


def test_a_table_keeps_these_cells_and_at_least_one_of_each():
    table = small_table(6, holes=0.3)
    cells = torch.zeros(6, 12, dtype=torch.bool)
    cells[:4, :3] = True
    kept = with_cells(table, cells)
    assert torch.equal(kept.mask[:4, :3], table.mask[:4, :3])
    assert not (kept.mask & ~table.mask).any()
    assert kept.mask.any(0).all()
    assert kept.mask.any(1).all()
    assert torch.equal(kept.accuracy.isnan(), ~kept.mask)
    assert torch.equal(kept.latency_ms[kept.mask], table.latency_ms[kept.mask])


def designs(draws, samples=30, count=8, rounds=3, stages=0.0, test=5):
    """A design after each round, the seconds of each cell and stage; cells are chosen at random."""
    cell_s = draws.uniform(0.5, 2, (samples, count))
    stage_s = np.full(samples, stages)
    whole = np.arange(samples) < test
    score = draws.random((samples, count))
    score[:test] = -np.inf
    design = CellDesign.first_round(whole, count, 2)
    made = [design]
    for _ in range(rounds - 1):
        design = design.next_round(score, cell_s, stage_s, 60.0)
        made.append(design)
    return made, cell_s, stage_s


def seconds_of(cells, cell_s, stage_s):
    return cell_s[cells].sum() + stage_s[cells.any(1)].sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.sampled_from([0.0, 1.0]))
def test_further_rounds_are_nested_and_a_quarter_of_them_is_random(seed, stages):
    made, cell_s, stage_s = designs(np.random.default_rng(seed), stages=stages)
    for number, (before, after) in enumerate(itertools.pairwise(made), 2):
        assert not (before.cells & ~after.cells).any()
        np.testing.assert_array_equal(before.rounds[before.cells], after.rounds[before.cells])
        new = after.rounds == number
        random = new & (after.probability < 1)
        # each stands for as many as were left
        np.testing.assert_allclose((1 / after.probability[random]).sum(), (~before.cells).sum())
        spent = seconds_of(new, cell_s, stage_s)
        assert seconds_of(random, cell_s, stage_s) >= AT_RANDOM * spent
        assert 40 < spent <= 60 + 2
        assert (after.cells == (after.probability > 0)).all()


def test_samples_to_test_on_are_whole_or_drawn_at_random():
    made, *_ = designs(np.random.default_rng(0))
    assert (made[-1].rounds[:5] == 1).all()
    assert (made[-1].probability[:5] == 1).all()
    # in part, they are not chosen
    draws = np.random.default_rng(1)
    score = draws.random((30, 8))
    score[:5] = -np.inf
    design = CellDesign.first_round(np.zeros(30, bool), 8, 2)
    after = design.next_round(score, np.ones((30, 8)), np.zeros(30), 60.0)
    assert (after.probability[:5][after.cells[:5]] < 1).all()
    assert (after.probability[5:] == 1).any()


def test_what_is_chosen_has_the_highest_scores():
    design = CellDesign.first_round(np.zeros(4, bool), 5, 1)
    score = np.arange(20.0).reshape(4, 5)
    after = design.next_round(score, np.ones((4, 5)), np.zeros(4), 8.0)
    new = after.rounds == 2
    chosen = new & (after.probability == 1)
    left = ~new & ~design.cells
    # a quarter of 8 cells at random, of the 16 that were left
    assert (new.sum(), chosen.sum()) == (8, 6)
    np.testing.assert_allclose(after.probability[new & ~chosen], [2 / 16] * 2)
    assert score[chosen].min() > score[left].max()


def test_all_that_is_left_is_drawn_for_certain():
    design = CellDesign.first_round(np.zeros(4, bool), 5, 1)
    after = design.next_round(np.zeros((4, 5)), np.ones((4, 5)), np.zeros(4), 1e6)
    assert after.cells.all()
    assert (after.probability[~design.cells] == 1).all()
    again = after.next_round(np.zeros((4, 5)), np.ones((4, 5)), np.zeros(4), 1.0)
    assert again is after
    # they give no estimate of their own, so the first round has all of the weight
    weights = inverse_weights(after.probability, after.rounds)
    np.testing.assert_allclose(weights, np.where(after.rounds == 1, 5, 0))


def test_added_cells_are_certain_and_keep_what_there_was():
    design = CellDesign.first_round(np.zeros(4, bool), 5, 1)
    after = design.added(np.ones((4, 5), bool))
    assert (after.probability == np.where(design.cells, 0.2, 1)).all()
    assert (after.rounds == np.where(design.cells, 1, 2)).all()


def test_an_interrupted_round_drew_fewer_cells():
    made, *_ = designs(np.random.default_rng(0))
    design = made[-1]
    random = np.flatnonzero((design.rounds == 3) & (design.probability < 1))
    done = design.cells.copy()
    done.flat[random[::2]] = False
    part = design.measured(done)
    share = done.flat[random].mean()
    np.testing.assert_allclose(
        part.probability.flat[random[1::2]], design.probability.flat[random[1::2]] * share
    )
    assert (part.cells == done).all()
    earlier = done & (design.rounds < 3)
    np.testing.assert_array_equal(part.probability[earlier], design.probability[earlier])


def test_a_mean_by_inverse_probability_is_unbiased_whatever_was_chosen():
    """Known truth: what is chosen depends on what was measured, as strongly as it can."""
    draws = np.random.default_rng(0)
    values = draws.random((12, 6)) ** 2
    values[:, 3] += 1.0
    cell_s = draws.uniform(0.5, 2, (12, 6))
    estimates = []
    naive = []
    for seed in range(2000):
        design = CellDesign.first_round(np.arange(12) == 0, 6, 1, seed)
        for _ in range(2):
            seen = np.where(design.cells, values, np.nan)
            # high where neighbours were high, and in configurations that were
            level = np.nanmean(seen, 1, keepdims=True) * np.nan_to_num(np.nanmean(seen, 0), nan=1.0)
            level[0] = -np.inf
            design = design.next_round(level, cell_s, np.zeros(12), 12.0, seed)
        weights = inverse_weights(design.probability, design.rounds)
        estimates.append((weights * values).sum() / values.size)
        naive.append(values[design.cells].mean())
    error = np.std(estimates) / 2000**0.5
    assert abs(np.mean(estimates) - values.mean()) < 3 * error
    assert abs(np.mean(naive) - values.mean()) > 20 * error
