import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.common.errors import InputError
from knobwise.losses.functional import (
    clipped_surrogate,
    doubly_robust,
    effective_sample_size,
    entropy,
    even_weight,
    expectation,
    expected_k3,
    group_advantage,
    k3,
    known_advantage,
    reward_weighted_cross_entropy,
    weight_of_best,
)
from knobwise.losses.settings import ADVANTAGES

INF = math.inf
ROUNDING = 2e-7
RELATIVE = [kind for kind in ADVANTAGES if kind != "unnormalised"]


def log(values):
    return torch.tensor(values, dtype=torch.float64).log()


def rounded(values):
    """Equal to these numbers but for the rounding of float32."""
    return pytest.approx(values, rel=ROUNDING, abs=0)


def near(values):
    """Equal to these numbers but for the rounding of sums, also where they cancel."""
    return pytest.approx(values, rel=1e-6, abs=1e-6)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_log_probs(*shape, seed=0):
    return normal(*shape, seed=seed).log_softmax(-1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "cut"),
    [
        (1.1, 2.0, 2.2, False),  # inside, A > 0
        (1.5, 2.0, 2.4, True),  # above, A > 0: clipped to 1.2 · 2
        (0.5, 2.0, 1.0, False),  # below, A > 0: min keeps ρA, the gradient can bring it back
        (0.9, -2.0, -1.8, False),  # inside, A < 0
        (0.5, -2.0, -1.6, True),  # below, A < 0: clipped to 0.8 · −2
        (1.5, -2.0, -3.0, False),  # above, A < 0: min keeps ρA
        (1.5, 0.0, 0.0, False),  # nothing to cut
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, objective, cut):
    log_prob = log([0.2 * ratio]).requires_grad_()
    value, was_cut = clipped_surrogate(
        log_prob, log([0.2]), torch.tensor([advantage], dtype=torch.float64), 0.2
    )
    assert value.item() == pytest.approx(objective)
    assert was_cut.tolist() == [cut]
    value.sum().backward()
    assert log_prob.grad.item() == pytest.approx(0.0 if cut else ratio * advantage)


def test_k3_is_never_negative_and_zero_at_equality():
    p, q = random_log_probs(1000, 5), random_log_probs(1000, 5, seed=1)
    assert (k3(p, q) >= 0).all()
    assert (k3(p, p) == 0).all()
    assert k3(log([0.5]), log([0.25])).item() == pytest.approx(0.5 - 1 + math.log(2))
    # in expectation it is the KL
    torch.testing.assert_close(expectation(k3(p, q), p.exp()), (p.exp() * (p - q)).sum(-1))


def test_the_weighted_k3_is_the_sum_and_does_not_overflow_where_the_weight_is_nothing():
    old, new, reference = (random_log_probs(5, 4, seed=seed) for seed in range(3))
    wanted = expectation(k3(new, reference), old.exp())
    torch.testing.assert_close(expected_k3(new, reference, old, old.exp()), wanted)
    torch.testing.assert_close(expected_k3(new, reference), k3(new, reference).mean(-1))
    far = torch.tensor([[0.0, -300.0]], requires_grad=True)  # float32: e⁻³⁰⁰ is 0, e³⁰⁰ is ∞
    reference = torch.tensor([[0.5, 0.5]]).log()
    estimate = expected_k3(far, reference, far.detach(), far.detach().exp())
    assert estimate.item() == pytest.approx(
        (0.5 - 1 + math.log(2)) + 0.5, rel=1e-5
    )  # 2nd: π·(½/π − 1 − ln(½/π)) → ½
    (slope,) = torch.autograd.grad(estimate.sum(), far)
    assert slope.tolist()[0] == pytest.approx([0.5, -0.5], rel=1e-5)


def test_entropy_by_hand_and_masked_alternatives_count_nothing():
    assert entropy(log([0.25] * 4)).item() == pytest.approx(math.log(4))
    assert entropy(log([0.5, 0.5, 0.0])).item() == pytest.approx(math.log(2))
    assert entropy(log([1.0, 0.0])).item() == 0
    logits = normal(4).requires_grad_()
    masked = logits.masked_fill(torch.tensor([False, True, False, False]), -INF)
    entropy(masked.log_softmax(-1)).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.count_nonzero() == 3


def test_effective_sample_size_by_hand():
    assert effective_sample_size(torch.zeros(2, 3)).item() == 1
    # ρ = 1, 3: (mean 2)² / mean of squares 5
    assert effective_sample_size(log([1.0, 3.0])).item() == pytest.approx(0.8)
    # ρ = 2, ½ with weights ⅓, ⅔: (1)² / (4/3 + 1/6)
    weight = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    assert effective_sample_size(log([2.0, 0.5]), weight).item() == pytest.approx(1 / 1.5)
    assert effective_sample_size(torch.tensor([2000.0, 2000.0])).item() == 1  # no overflow


def test_rce_leaves_masked_alternatives_out_whatever_stands_there():
    mask = torch.tensor([True, True, False])
    log_probs = torch.tensor(
        [math.log(0.1), math.log(0.9), -INF], dtype=torch.float64, requires_grad=True
    )
    wanted = -(0.25 * math.log(0.1) + 0.75 * math.log(0.9))
    for nonsense in (math.nan, 1e9, 0.0):
        rewards = torch.tensor([0.0, math.log(3) / 2, nonsense], dtype=torch.float64)
        loss = reward_weighted_cross_entropy(log_probs, rewards, 0.5, mask)
        assert loss.item() == pytest.approx(wanted)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        assert gradient.tolist() == pytest.approx([-0.25, -0.75, 0.0])


@pytest.mark.parametrize(
    ("kind", "settings", "reward", "wanted"),
    [
        ("centred", {}, [1.0, 2.0, 6.0], [-2.0, -1.0, 3.0]),
        # variance (4 + 4 + 16)/3
        ("zscore", {}, [0.0, 0.0, 6.0], rounded([each / math.sqrt(8) for each in (-2, -2, 4)])),
        # the floor keeps noise small: deviations ±2⁻¹⁰, divided by .1
        ("zscore", {}, [0.5, 0.5 + 2**-9], rounded([-10 * 2**-10, 10 * 2**-10])),
        # the reward itself, cut at 5, as all of them
        ("unnormalised", {}, [1.0, 2.0, 6.0], [1.0, 2.0, 5.0]),
        ("rank", {}, [2.0, 2.0, 1.0], near([0.5, 0.5, -1.0])),  # 1 − 2·rank/(G − 1), ranks ½, ½, 2
        ("centred", {"clip": 5.0}, [-10.0, 10.0], [-5.0, 5.0]),
        ("centred", {"clip": 50.0}, [-10.0, 10.0], [-10.0, 10.0]),
    ],
)
def test_advantages_by_hand(kind, settings, reward, wanted):
    result = group_advantage(torch.tensor([reward]), kind, **settings)
    assert result.tolist()[0] == wanted


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("centred", rounded([-1.5, -0.5, 3.5])),  # mean .5 + .5 + 1.5 = 2.5
        # variance .5·2.25 + .25·.25 + .25·12.25
        ("zscore", rounded([each / math.sqrt(4.25) for each in (-1.5, -0.5, 3.5)])),
        # mass that is worse − mass that is better, −.5, .25, .75, over 1 − .375
        ("rank", near([-0.8, 0.4, 1.2])),
        ("unnormalised", [1.0, 2.0, 6.0]),
    ],
)
def test_weighted_advantages_by_hand(kind, wanted):
    reward, weight = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    result = group_advantage(reward, kind, weight=weight, clip=9.0)
    assert result.tolist()[0] == wanted


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(kind):
    assert group_advantage(torch.tensor([[3.7], [-2.0]]), kind).tolist() == [[0.0], [0.0]]
    assert group_advantage(torch.full((2, 4), 0.25), kind).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_alternatives_of_weight_zero_do_not_touch_the_others(kind):
    reward, weight = normal(3, 6), torch.tensor([0.3, 0.0, 0.2, 0.4, 0.0, 0.1], dtype=torch.float64)
    kept = weight > 0
    alone = group_advantage(reward[:, kept], kind, weight=weight[kept].expand(3, -1))
    for nonsense in (0.0, 1e6, -1e6):
        filled = torch.where(kept, reward, nonsense)
        result = group_advantage(filled, kind, weight=weight.expand(3, -1))
        torch.testing.assert_close(result[:, kept], alone)


def test_even_weights_by_hand():
    mask = torch.tensor([[True, True, False, False], [False, True, False, False]])
    assert even_weight(mask).tolist() == [[0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", RELATIVE)
def test_the_expectation_of_advantages_is_zero_in_every_group(kind):
    reward, weight = normal(50, 6), torch.rand(50, 6, dtype=torch.float64).softmax(-1)
    for w in (None, weight):
        assert expectation(group_advantage(reward, kind, weight=w), w).abs().max() < 1e-12


def test_groups_do_not_touch_one_another():
    reward = normal(4, 2, 5)
    for kind in ADVANTAGES:
        singly = torch.stack([group_advantage(group, kind) for group in reward.flatten(0, 1)])
        torch.testing.assert_close(group_advantage(reward, kind).flatten(0, 1), singly)


def test_no_gradient_goes_through_rewards_and_another_kind_is_refused():
    assert not group_advantage(normal(2, 3).requires_grad_(), "zscore").requires_grad
    with pytest.raises(ValueError, match=r"'mean'.*zscore, centred, rank, unnorm"):
        group_advantage(torch.zeros(1, 2), "mean")


def test_weights_of_the_best_by_hand():
    reward = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 1.0, 2.0, 9.0]])
    assert weight_of_best(reward, 2).tolist() == [[0.0, 0.5, 0.0, 0.5], [0.5, 0.0, 0.0, 0.5]]
    weight = torch.tensor([[0.2, 0.0, 0.3, 0.5], [0.0, 1.0, 0.0, 0.0]])
    assert weight_of_best(reward, 2, weight).tolist() == [
        [0.0, 0.0, 0.5, 0.5],
        [0.0, 1.0, 0.0, 0.0],
    ]
    assert weight_of_best(reward, 9).tolist() == [[0.25] * 4] * 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7))
@settings(max_examples=30, deadline=None)
def test_rank_advantages_count_the_worse_and_the_better(values):
    result = group_advantage(torch.tensor([values], dtype=torch.float64), "rank")[0].tolist()
    others = max(len(values) - 1, 1)
    for value, advantage in zip(values, result, strict=True):
        worse = sum(other < value for other in values)
        better = sum(other > value for other in values)
        assert advantage == pytest.approx((worse - better) / others)


def test_doubly_robust_rewards_by_hand():
    expected = torch.tensor([[0.5, 0.2, 0.1], [0.4, 0.3, 0.9]])
    rewards = doubly_robust(
        expected, torch.tensor([1, 2]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.1]), 5.0
    )
    # 0.2 + (1 − 0.2)/0.5; 0.9 + min(10, 5)·(0 − 0.9)
    assert rewards.flatten().tolist() == rounded([0.5, 1.8, 0.1, 0.4, 0.3, -3.6])


def test_an_advantage_of_ones_own_and_what_is_refused():
    own = known_advantage("examples.advantages:leave_one_out")
    assert group_advantage(torch.tensor([[1.0, 0.0, 0.5]]), own).tolist() == [
        pytest.approx([0.75, -0.75, 0.0])
    ]
    weight = torch.tensor([[0.5, 0.25, 0.25]])  # the others of the first are worth 0.25 on the mean
    assert group_advantage(torch.tensor([[1.0, 0.0, 0.5]]), own, weight=weight).tolist() == [
        pytest.approx([0.75, -0.8333333, -0.1666667])
    ]
    reward = torch.rand(4, 1, 3)
    for wrong in (
        lambda reward, weight: reward.mean(-1),  # would be stretched over all contexts
        lambda reward, weight: reward * torch.nan,
    ):
        with pytest.raises(InputError, match="finite"):
            group_advantage(reward, wrong)
    for name in ("examples.advantages:loo", "math:sqrt"):
        with pytest.raises(InputError, match=r"loss\.advantage"):
            known_advantage(name)
