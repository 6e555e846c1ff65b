"""Which cells of a profile to measure."""

import torch
from helpers import small_table
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.profiling.measuring.cell_design import balanced_cells, with_cells


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
