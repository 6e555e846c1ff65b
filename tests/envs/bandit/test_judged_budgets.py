"""The budgets that policies are judged by."""

import pytest
import torch
from helpers import table_of

from knobwise.envs.bandit.budgets import few_budgets, judged_budgets


@pytest.mark.parametrize(
    "latency_ms",
    [
        # all differ, and the floor leaves few above it
        [[12.5], [12.6], [16.0], [61.7]],
        # most are equal
        [[10.0], [10.0], [10.0], [10.0]],
    ],
)
def test_a_note_on_few_budgets_counts_them_and_claims_no_equal_latencies(latency_ms):
    budgets_ms = judged_budgets(table_of([[1.0]] * 4, latency_ms), None)
    (note,) = few_budgets(budgets_ms)
    assert len(budgets_ms) < 5
    assert f"only {len(budgets_ms)} of 5" in note
    assert "budgets_ms" in note
    assert "equal" not in note
    assert few_budgets(torch.arange(5.0)) == []
