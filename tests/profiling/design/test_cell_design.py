"""Which cells of a profile to measure."""

import numpy as np
import torch
from helpers import input_error, small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.profiling.design.cell_design import (
    FEWEST,
    CellDesign,
    balanced_cells,
    cells_to_measure,
    part_of,
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


def test_samples_to_test_on_are_whole_or_drawn_in_part():
    parts = ("test", "train") * 5
    design = cells_to_measure(parts, 10, 8, 2, whole_test=True)
    assert (design.probability[::2] == 1).all()
    assert design.cells[1::2].sum(1).tolist() == [2] * 5
    assert (design.probability[1::2][design.cells[1::2]] == 2 / 8).all()
    assert design.weight[1::2].sum(1).tolist() == [8] * 5
    design = cells_to_measure(parts, 10, 8, 2, whole_test=False)
    assert design.cells.sum(1).tolist() == [2] * 10
    # without parts all cells are measured
    assert (cells_to_measure((), 10, 8, 0, whole_test=True).probability == 1).all()


def test_sure_cells_stand_for_themselves_and_keep_what_was_drawn():
    design = CellDesign.draw(np.zeros(4, bool), 5, 1)
    after = design.with_sure(np.ones((4, 5), bool))
    assert (after.probability == np.where(design.cells, 0.2, 1)).all()
    assert (after.weight == 1).all()


def test_a_mean_by_inverse_probability_is_unbiased():
    """Known truth."""
    draws = np.random.default_rng(0)
    values = draws.random((12, 6)) ** 2
    values[0] += 1.0  # the sample that is measured whole
    estimates = []
    naive = []
    for seed in range(2000):
        design = CellDesign.draw(np.arange(12) == 0, 6, 1, seed)
        estimates.append((design.weight * values).sum() / values.size)
        naive.append(values[design.cells].mean())
    error = np.std(estimates) / 2000**0.5
    assert abs(np.mean(estimates) - values.mean()) < 3 * error
    assert abs(np.mean(naive) - values.mean()) > 20 * error


def test_what_was_measured_when_a_limit_was_reached_is_a_part_of_the_design():
    design = CellDesign.draw(np.zeros(4, bool), 5, 1)
    sure = np.zeros((4, 5), bool)
    sure[:, :2] = True
    # all that was drawn, and a part of the others
    done = design.cells | (sure & [[True], [True], [False], [False]])
    part = part_of(design, sure, done, ("train",) * 4, "knobs.max_hours=1")
    assert (part.cells == done).all()
    assert (part.sure == (sure & done)).all()
    assert (part.probability[design.cells] == 0.2).all()
    # a cell that was drawn is missing
    done[tuple(np.argwhere(design.cells)[0])] = False
    with input_error("knobs.max_hours=1: .* 3 of 4 cells"):
        part_of(design, sure, done, ("train",) * 4, "knobs.max_hours=1")


def test_without_parts_each_configuration_needs_a_few_samples():
    design = CellDesign.draw(np.ones(10, bool), 3, 0)
    nothing = np.zeros((10, 3), bool)
    done = np.arange(10)[:, None] < [FEWEST, 10, FEWEST]
    assert (part_of(design, nothing, done, (), "max_usd=1").cells == done).all()
    done[0, 2] = False
    with input_error("max_usd=1"):
        part_of(design, nothing, done, (), "max_usd=1")
