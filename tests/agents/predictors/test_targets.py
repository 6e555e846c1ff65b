from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from helpers import small_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.predictors.folds import Targets, folds_of

NAN = math.nan
ALL = torch.arange(2)


def measured(targets: Targets, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Accuracy and log-latency, from what stands in `values`."""
    scale, offset = targets.units
    return (values * scale + offset).chunk(2, 1)


def test_each_block_is_centred_per_configuration_and_scaled_as_a_whole() -> None:
    accuracy = [[0.0, 0.5], [1.0, 0.5]]  # centres ½ and ½, deviations ∓½ and 0: root mean square ½/√2
    table = table_of(accuracy, [[1.0, math.e], [1.0, math.e**3]])  # centres 0 and 2, deviations 0 and ∓1
    targets = Targets(table, ALL, np.zeros((2, 1)))
    root = math.sqrt(2)
    np.testing.assert_allclose(targets.values, [[-root, 0, 0, -root], [root, 0, 0, root]], atol=1e-6)
    torch.testing.assert_close(targets.centre, torch.tensor([[0.5, 0.5], [0.0, 2.0]]))
    torch.testing.assert_close(targets.scale, torch.tensor([0.5 / root, 1 / root]))


def test_outcomes_come_back_from_what_regressors_say() -> None:
    table = small_table(20)
    targets = Targets(table, torch.arange(5, 20), np.zeros((15, 1)))
    accuracy, log_latency = measured(targets, torch.from_numpy(targets.values).float())
    torch.testing.assert_close(accuracy, table.accuracy[5:])
    torch.testing.assert_close(log_latency, table.latency_ms[5:].log())


def test_what_never_varies_is_zero_and_comes_back() -> None:
    table = table_of([[1.0, 1.0]] * 2, [[5.0, 5.0]] * 2)
    targets = Targets(table, ALL, np.zeros((2, 1)))
    assert not targets.values.any()
    accuracy, log_latency = measured(targets, torch.zeros(2, 4))
    torch.testing.assert_close(accuracy, torch.ones(2, 2))
    torch.testing.assert_close(log_latency.exp(), torch.full((2, 2), 5.0))


def test_what_was_not_profiled_is_filled_by_configuration_and_by_sample() -> None:
    latency = [[math.e, math.e**2, NAN], [math.e**3, NAN, NAN], [1.0, 1.0, 1.0]]
    targets = Targets(table_of([[0.2, 0.6, NAN], [0.6, NAN, NAN], [1.0, 1.0, 1.0]], latency), ALL, np.zeros((2, 1)))
    accuracy, log_latency = measured(targets, torch.from_numpy(targets.values).float())
    # the second sample is better by .4 and slower by 2 where both were profiled, so it is thought so elsewhere, with
    # some doubt; the last configuration was never profiled in these rows: always wrong, and as slow as the slowest
    filled = accuracy[1, 1].item(), log_latency[1, 1].item()
    assert 0.6 < filled[0] < 1.0
    assert 2.0 < filled[1] < 4.0
    torch.testing.assert_close(accuracy, torch.tensor([[0.2, 0.6, 0.0], [0.6, filled[0], 0.0]]))
    torch.testing.assert_close(log_latency, torch.tensor([[1.0, 2.0, 2.0], [3.0, filled[1], 2.0]]))


def test_holes_are_filled_with_what_the_features_say() -> None:
    generator = torch.Generator().manual_seed(0)
    kind = (torch.arange(200) % 2).float()
    accuracy = torch.stack([kind, 1 - kind], 1)
    hole = torch.rand(200, 2, generator=generator) < 0.3
    hole[:, 0] &= ~hole[:, 1]
    seen = accuracy.masked_fill(hole, NAN)
    table = table_of(seen.tolist(), torch.ones(200, 2).masked_fill(hole, NAN).tolist())
    targets = Targets(table, torch.arange(200), (2 * kind - 1).double().unsqueeze(1).numpy())
    filled, _ = measured(targets, torch.from_numpy(targets.values).float())
    assert (filled - accuracy)[hole].abs().mean() < 0.15  # the mean of a configuration alone is off by .5
    torch.testing.assert_close(filled[~hole], accuracy[~hole])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(2, 7), st.integers(0, 99))
def test_folds_hold_out_everything_once_and_keep_images_together(size: int, of: int, count: int, seed: int) -> None:
    table = dataclasses.replace(small_table(44), image_ids=tuple(str(i // of) for i in range(44)))
    rows = torch.randperm(44, generator=torch.Generator().manual_seed(seed))[:size]
    division = folds_of(table, rows, seed, count)
    images = rows // of
    if len(images.unique()) < 2:
        assert len(division) == 1
        return
    assert len(division) == min(count, len(images.unique()))
    assert sorted(int(i) for _, held_out in division for i in held_out) == list(range(size))
    for fit, held_out in division:
        assert sorted([*fit, *held_out]) == list(range(size))
        assert not set(images[fit].tolist()) & set(images[held_out].tolist())


def test_images_of_the_same_name_in_two_data_sets_are_two() -> None:
    table = dataclasses.replace(small_table(4), image_ids=("a", "a", "a", "a"), datasets=("one", "one", "two", "two"))
    held_out = [set(hold.tolist()) for _, hold in folds_of(table, torch.arange(4), seed=0)]
    assert sorted(map(sorted, held_out)) == [[0, 1], [2, 3]]


def test_folds_are_a_matter_of_the_seed() -> None:
    table, rows = small_table(40), torch.arange(40)
    held_out = [[hold.tolist() for _, hold in folds_of(table, rows, seed)] for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_one_sample_is_its_own_fold() -> None:
    ((fit, hold),) = folds_of(small_table(3), torch.tensor([2]), seed=0)
    assert fit.tolist() == hold.tolist() == [0]
