from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted


def tiny(n: int = 40, configurations: int = 3, limits: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What was really got, [B, n, C], a member that knows nothing of it, and a mask that allows everything."""
    generator = torch.Generator().manual_seed(seed)
    worth, noise = torch.rand(2, limits, n, configurations, generator=generator)
    return worth, noise, torch.ones(n, configurations, dtype=torch.bool)


def test_a_perfect_member_beside_a_useless_one() -> None:
    worth, noise, mask = tiny(400)
    for scores, best in (([worth, noise], 0), ([noise, worth], 1)):
        weights = stack_weights(HeldOut(scores, worth, mask))
        assert weights[best] > 0.99
        assert weights.sum().item() == pytest.approx(1)


def test_a_member_that_is_always_wrong_gets_nothing() -> None:
    worth, _, mask = tiny()
    assert stack_weights(HeldOut([-worth, worth], worth, mask)).tolist() == pytest.approx([0.0, 1.0])


def test_least_squares_by_hand() -> None:
    # one sample, inside which worth = 1·a + 3·b, and a and b stand at right angles
    a, b = torch.tensor([[[1.0, -1.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 0.0, 1.0, -1.0]]])
    held_out = HeldOut([a, b], a + 3 * b, torch.ones(1, 4, dtype=torch.bool))
    # least squares ¼ : ¾; greedy selection takes b, whose choice is worth 3, and nothing betters it
    assert stack_weights(held_out).tolist() == pytest.approx([0.125, 0.875])


def test_greedy_takes_what_betters_the_decision_by_hand() -> None:
    # two samples: the first member is right of the first and undecided, by a little wrong, of the second; the second
    # member the other way round. Alone each gets ½; one of each gets 1, and so half the weight each
    one = torch.tensor([[[1.0, 0.0], [0.4, 0.5]]])
    other = torch.tensor([[[0.4, 0.5], [1.0, 0.0]]])
    worth = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    held_out = HeldOut([one, other], worth, torch.ones(2, 2, dtype=torch.bool))
    assert held_out.mean_worth(one) == held_out.mean_worth(other) == 0.5
    assert held_out.mean_worth(one + other) == 1.0
    assert stack_weights(held_out).tolist() == pytest.approx([0.5, 0.5])


def test_what_is_the_same_for_all_configurations_of_a_sample_does_not_matter() -> None:
    worth, noise, mask = tiny()
    member = worth + 0.3 * noise
    level = 100 * torch.rand(2, 40, 1, generator=torch.Generator().manual_seed(9))
    result = [stack_weights(HeldOut([score, noise], worth, mask)) for score in (member, member + level)]
    torch.testing.assert_close(*result, atol=1e-3, rtol=0)


def test_what_was_not_profiled_does_not_matter() -> None:
    worth, noise, _ = tiny()
    mask = torch.rand(40, 3, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[torch.arange(40), torch.arange(40) % 3] = True
    members = [worth + 0.5 * noise, noise]
    result = []
    for nonsense in (0.0, 50.0, -50.0):
        spoiled = [m.masked_fill(~mask, nonsense) for m in members]
        result.append(stack_weights(HeldOut(spoiled, worth.masked_fill(~mask, nonsense), mask)))
    torch.testing.assert_close(result[0], result[1])
    torch.testing.assert_close(result[0], result[2])


def test_members_that_say_the_same_of_everything_share_evenly() -> None:
    _, _, mask = tiny()
    flat = torch.ones(2, 40, 3)
    worth = torch.rand(2, 40, 3, generator=torch.Generator().manual_seed(0))
    weights = stack_weights(HeldOut([flat, 2 * flat], worth, mask))
    assert weights.sum().item() == pytest.approx(1)
    assert (weights >= 0).all()


def test_members_that_nearly_agree_are_no_trouble() -> None:
    worth, noise, mask = tiny(300)
    nearly = [noise + 1e-7 * k * worth for k in range(6)]
    weights = stack_weights(HeldOut([*nearly, worth], worth, mask))
    assert weights[:-1].sum() < 0.01


def test_one_member_has_all_the_weight() -> None:
    worth, noise, mask = tiny()
    assert stack_weights(HeldOut([noise], worth, mask)).tolist() == [1.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(0, 999), st.booleans())
def test_weights_are_not_negative_and_sum_to_one(k: int, n: int, c: int, seed: int, equal: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = list(torch.randn(k, 2, n, c, generator=generator))
    if equal:
        scores = [scores[0]] * k
    mask = torch.rand(n, c, generator=generator) < 0.5
    mask[:, 0] = True
    weights = stack_weights(HeldOut(scores, torch.rand(2, n, c, generator=generator), mask))
    assert weights.shape == (k,)
    assert weights.dtype == torch.float64
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1)


def test_mean_worth_and_some_of_the_samples() -> None:
    worth = torch.tensor([[[0.1, 0.9], [0.7, 0.3], [0.2, 0.4]]])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    held_out = HeldOut([worth], worth, mask)
    assert held_out.mean_worth(worth) == pytest.approx((0.1 + 0.7 + 0.4) / 3)  # .9 was not profiled
    part = held_out.take(torch.tensor([2, 0]))
    assert part.mean_worth(part.scores[0]) == pytest.approx((0.4 + 0.1) / 2)


def test_weighted_leaves_members_of_no_weight_out() -> None:
    spoiled = torch.full((2,), torch.nan)
    result = weighted([torch.tensor([1.0, 2.0]), spoiled, torch.tensor([3.0, 4.0])], torch.tensor([0.25, 0.0, 0.75]))
    assert result.tolist() == [2.5, 3.5]
    assert weighted([spoiled, torch.ones(2)], torch.tensor([0.0, 1.0])).tolist() == [1.0, 1.0]
