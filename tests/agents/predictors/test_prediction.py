from __future__ import annotations

import math

import pytest
import torch

from knobwise.agents.predictors.experts import Prediction, pick

# margins of +1 and −1 standard deviation and +2 of a smaller one under a budget of e²
BY_HAND = Prediction(torch.tensor([[0.5, 2.0, -1.0]]), torch.tensor([[1.0, 3.0, 1.0]]), torch.tensor([1.0, 1.0, 0.5]))
BUDGET = torch.tensor([math.e**2])


def test_the_probability_of_meeting_a_budget_by_hand() -> None:
    torch.testing.assert_close(BY_HAND.meets(BUDGET), torch.tensor([[0.841345, 0.158655, 0.977250]]))


def test_a_spread_for_each_request_is_taken_too() -> None:
    wide = BY_HAND._replace(spread=torch.tensor([[2.0, 1.0, 1.0]]))  # half a deviation, −1, +1
    torch.testing.assert_close(wide.meets(BUDGET), torch.tensor([[0.691462, 0.158655, 0.841345]]))


def test_expected_utility_by_hand() -> None:
    # accuracy is kept within [.001, 1]
    wanted = torch.tensor([[0.5 * 0.841345, 0.158655, 0.001 * 0.977250]])
    torch.testing.assert_close(BY_HAND.expected_utility(BUDGET), wanted)


def test_mean_latency_is_that_of_a_log_normal_variable() -> None:
    wanted = torch.tensor([[math.exp(1.5), math.exp(3.5), math.exp(1.125)]])
    torch.testing.assert_close(BY_HAND.latency_ms, wanted)
    draws = torch.exp(1 + torch.randn(400_000, generator=torch.Generator().manual_seed(0)))
    assert draws.mean().item() == pytest.approx(math.exp(1.5), rel=0.02)


def test_pick_takes_the_faster_among_equals_and_stays_in_the_mask() -> None:
    scores, latency = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 9.0, 8.0, 1.0])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False], [True, False, False, False]])
    assert pick(scores, latency, mask).tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="without any configuration"):
        pick(scores, latency, torch.zeros(1, 4, dtype=torch.bool))
