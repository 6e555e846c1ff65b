"""Which cells would change decisions most."""

from dataclasses import replace

import numpy as np
import torch
from helpers import close, small_table

from knobwise.agents.evaluation.informative_cells import outlook_of
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.cell_design import balanced_cells, with_cells


def sparse_table(per_sample=4, samples=150, **changes) -> ProfileTable:
    """A part of the cells; samples to test on whole."""
    table = small_table(samples, **changes)
    parts = np.empty(samples, object)
    for name, rows in table.split()._asdict().items():
        parts[rows.numpy()] = name
    table = replace(table, parts=tuple(parts))
    cells = balanced_cells(samples, table.num_configurations, per_sample)
    cells[table.split().test] = True
    return with_cells(table, cells)


def test_samples_to_test_on_are_neither_chosen_nor_looked_at():
    table = sparse_table()
    outlook = outlook_of(table)
    test = table.split().test
    assert outlook.score[test].isneginf().all()
    rest = torch.cat([table.split().train, table.split().validation])
    assert outlook.score[rest].isfinite().all()
    accuracy = table.accuracy.clone()
    accuracy[test] = 1 - accuracy[test]
    latency_ms = table.latency_ms.clone()
    latency_ms[test] *= 3
    other = outlook_of(replace(table, accuracy=accuracy, latency_ms=latency_ms))
    close(other.score[rest], outlook.score[rest])
    close(other.latency_ms[rest], outlook.latency_ms[rest])
    assert other.gain == outlook.gain


def test_what_can_never_be_the_best_comes_last():
    """The last configuration is slower than others by far, and never right."""
    table = sparse_table()
    accuracy = table.accuracy.clone()
    accuracy[:, -1] = accuracy[:, -1] * 0
    latency_ms = table.latency_ms.clone()
    latency_ms[:, -1] *= 20
    table = replace(table, accuracy=accuracy, latency_ms=latency_ms)
    rows = table.split().train
    score = outlook_of(table).score[rows].mean(0)
    assert score.argmin() == table.num_configurations - 1
    assert score[-1] < 0.2 * score.mean()


def test_expected_latencies_are_those_of_configurations_and_samples():
    table = sparse_table()
    whole = small_table(150)
    rows = table.split().train
    expected = outlook_of(table).latency_ms[rows]
    error = (expected / whole.latency_ms[rows]).log().abs()
    assert error.mean() < 0.15
    assert outlook_of(table).latency_ms.isfinite().all()


def test_the_gain_is_that_of_choosing_for_each_sample():
    gain = outlook_of(sparse_table(samples=300)).gain
    assert 0.02 < gain < 0.3
    # nothing can be known of samples without features
    assert abs(outlook_of(sparse_table(samples=300, features=False)).gain) < 0.04
