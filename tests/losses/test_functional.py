import math

import pytest
import torch
from helpers import close, input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.losses import ADVANTAGES
from knobwise.losses.functional import (
    clipped_surrogate,
    effective_sample_size,
    entropy,
    expectation,
    expected_k3,
    group_advantage,
    k3,
    known_advantage,
    rank_advantage,
    reward_spread,
    reward_weighted_cross_entropy,
    weight_of_best,
)

RELATIVE = [kind for kind in ADVANTAGES if kind != "unnormalised"]


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def log(values):
    return double(values).log()


def rounded(values):
    """Equal to these numbers but for the rounding of float32."""
    return pytest.approx(values, rel=2e-7, abs=0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


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
    value, was_cut = clipped_surrogate(log_prob, log([0.2]), double([advantage]), 0.2)
    assert value.item() == pytest.approx(objective)
    assert was_cut.item() == cut
    value.backward()
    assert log_prob.grad.item() == pytest.approx(0.0 if cut else ratio * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "cut"),
    [
        (1.25, 2.0, 2.5, False),  # below 1.28
        (1.5, 2.0, 2.56, True),  # clipped to 1.28 · 2
        (0.85, -2.0, -1.8, True),  # clipped to 0.9 · −2
    ],
)
def test_each_end_of_the_clip_has_its_own_epsilon(ratio, advantage, objective, cut):
    old = log([0.2])
    value, was_cut = clipped_surrogate(
        log([0.2 * ratio]), old, double([advantage]), double([0.1, 0.28])
    )
    assert value.item() == pytest.approx(objective)
    assert was_cut.item() == cut


def test_k3_is_never_negative_and_zero_at_equality():
    p, q = normal(2, 1000, 5).log_softmax(-1)
    assert (k3(p, q) >= 0).all()
    assert (k3(p, p) == 0).all()
    assert k3(log([0.5]), log([0.25])).item() == pytest.approx(0.5 - 1 + math.log(2))
    # in expectation it is the KL
    close(expectation(k3(p, q), p.exp()), (p.exp() * (p - q)).sum(-1))


def test_the_weighted_k3_is_the_sum_and_does_not_overflow_where_the_weight_is_nothing():
    old, new, reference = normal(3, 5, 4).log_softmax(-1)
    each = k3(new, reference)
    close(expected_k3(new, reference, old, old.exp()), expectation(each, old.exp()))
    close(expected_k3(new, reference), each.mean(-1))
    far = torch.tensor([[0.0, -300.0]], requires_grad=True)  # float32: e⁻³⁰⁰ is 0, e³⁰⁰ is ∞
    reference = torch.tensor([[0.5, 0.5]]).log()
    estimate = expected_k3(far, reference, far.detach(), far.detach().exp())
    # 2nd: π·(½/π − 1 − ln(½/π)) → ½
    assert estimate.item() == pytest.approx((0.5 - 1 + math.log(2)) + 0.5, rel=1e-5)
    estimate.backward()
    assert far.grad.tolist() == [pytest.approx([0.5, -0.5], rel=1e-5)]


def test_entropy_by_hand_and_masked_alternatives_count_nothing():
    assert entropy(log([0.25] * 4)).item() == pytest.approx(math.log(4))
    assert entropy(log([0.5, 0.5, 0.0])).item() == pytest.approx(math.log(2))
    assert entropy(log([1.0, 0.0])).item() == 0
    logits = normal(4).requires_grad_()
    entropy(logits.masked_fill(torch.arange(4) == 1, -math.inf).log_softmax(-1)).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.count_nonzero() == 3


def test_effective_sample_size_by_hand():
    assert effective_sample_size(torch.zeros(2, 3)).item() == 1
    # ρ = 2, ½ with weights ⅓, ⅔: (1)² / (4/3 + 1/6)
    weighted = effective_sample_size(log([2.0, 0.5]), double([1 / 3, 2 / 3]))
    assert weighted.item() == pytest.approx(1 / 1.5)
    assert effective_sample_size(torch.tensor([2000.0, 2000.0])).item() == 1  # no overflow


@pytest.mark.parametrize("nonsense", [math.nan, 1e9, 0.0])
def test_rce_leaves_masked_alternatives_out_whatever_stands_there(nonsense):
    log_probs = log([0.1, 0.9, 0.0]).requires_grad_()
    rewards = double([0.0, math.log(3) / 2, nonsense])
    loss = reward_weighted_cross_entropy(log_probs, rewards, 0.5, torch.arange(3) < 2)
    assert loss.item() == pytest.approx(-(0.25 * math.log(0.1) + 0.75 * math.log(0.9)))
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.25, -0.75, 0.0])


WEIGHTED = {"weight": torch.tensor([[0.5, 0.25, 0.25]]), "clip": 9.0}


@pytest.mark.parametrize(
    ("kind", "settings", "reward", "wanted"),
    [
        ("centred", {}, [1.0, 2.0, 6.0], [-2.0, -1.0, 3.0]),
        # variance (4 + 4 + 16)/3
        ("zscore", {}, [0.0, 0.0, 6.0], rounded([each / math.sqrt(8) for each in (-2, -2, 4)])),
        # a floor keeps noise small: deviations ±2⁻¹⁰, divided by .1
        (
            *("zscore", {"std_floor": 0.1}, [0.5, 0.5 + 2**-9]),
            rounded([-10 * 2**-10, 10 * 2**-10]),
        ),
        # (r − mean)/(std + ε): deviations ±1, std 1
        ("zscore", {"std_floor": 0.0, "std_eps": 0.25}, [3.0, 5.0], rounded([-0.8, 0.8])),
        # the reward itself, cut at 5
        ("unnormalised", {"clip": 5.0}, [1.0, 2.0, 6.0], [1.0, 2.0, 5.0]),
        ("centred", {"clip": 50.0}, [-10.0, 10.0], [-10.0, 10.0]),
        # mean .5 + .5 + 1.5 = 2.5
        ("centred", WEIGHTED, [1.0, 2.0, 6.0], rounded([-1.5, -0.5, 3.5])),
        # variance .5·2.25 + .25·.25 + .25·12.25
        (
            *("zscore", WEIGHTED, [1.0, 2.0, 6.0]),
            rounded([each / math.sqrt(4.25) for each in (-1.5, -0.5, 3.5)]),
        ),
        # mass that is worse − mass that is better, −.5, .25, .75, over 1 − .375
        ("rank", WEIGHTED, [1.0, 2.0, 6.0], pytest.approx([-0.8, 0.4, 1.2])),
        ("unnormalised", WEIGHTED, [1.0, 2.0, 6.0], [1.0, 2.0, 6.0]),
    ],
)
def test_advantages_by_hand(kind, settings, reward, wanted):
    result = group_advantage(torch.tensor([reward]), kind, **settings)
    assert result.tolist() == [wanted]


def test_the_spread_of_rewards_by_hand():
    # standard deviations 1, 2 and 3; the tenth above the 90 % quantile, 2.8, is left out
    groups = double([[0.0, 2.0], [1.0, 5.0], [-3.0, 3.0]])
    assert reward_spread(groups).item() == pytest.approx(1.5)
    # where 90 % of the groups do not differ all count: 20 · ½ of ten
    assert reward_spread(double([[1.0, 1.0]] * 9 + [[0.0, 20.0]])).item() == pytest.approx(1.0)
    assert reward_spread(double([[1.0, 1.0], [7.0, 7.0]])).item() == 0
    # a group of one and an empty group tell nothing, nor does what has no weight: √(.25·.75)·4
    weight = double([[0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    weighted = reward_spread(double([[1.0, 5.0, 99.0], [0.0, 8.0, 1.0], [0.0, 4.0, 1.0]]), weight)
    assert weighted.item() == pytest.approx(3**0.5)
    assert reward_spread(double([[4.0], [5.0]])).item() == 0


@given(st.floats(-3, 3, width=32), st.integers(1, 12), st.booleans())
def test_equal_rewards_have_no_advantage_whatever_their_level(level, differing, weighted):
    # the mean of equal float32 numbers is rounded
    reward = torch.full((128, 16), level)
    reward[:differing, 0] += 1
    weight = None
    if weighted:
        weight = torch.rand(128, 16, generator=torch.Generator().manual_seed(differing))
        weight[:, 3] = 0
        weight /= weight.sum(-1, keepdim=True)
        reward[:, 3] = 7.0
    for kind in RELATIVE:
        advantage = group_advantage(reward, kind, weight=weight)
        if weighted:
            advantage = advantage * weight
        assert not advantage[differing:].any()
        assert advantage[:differing].any()
    spread = reward_spread(reward, weight)
    if weighted:
        probability = weight[:differing, 0]
    else:
        probability = torch.full((differing,), 1 / 16)
    std = (probability * (1 - probability)).sqrt()
    assert spread.item() == pytest.approx(float(std.sum()) / 128, rel=1e-3)


def test_without_a_floor_it_is_a_share_of_the_spread_of_the_batch():
    # nine standard deviations of .01, one of .0001: the spread is .00901, the floor .3 of it
    groups = double([[0.0, 0.02]] * 9 + [[0.0, 0.0002]])
    wanted = double([[-1.0, 1.0]] * 9 + [[-0.0001 / 0.002703, 0.0001 / 0.002703]])
    close(group_advantage(groups, "zscore"), wanted)


@given(st.floats(1e-6, 1e6))
@settings(max_examples=20, deadline=None)
def test_z_scores_do_not_depend_on_the_unit_of_the_reward(unit):
    reward = normal(6, 5)
    close(group_advantage(unit * reward, "zscore"), group_advantage(reward, "zscore"))
    close(reward_spread(unit * reward), unit * reward_spread(reward))


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(kind):
    assert group_advantage(torch.tensor([[3.7], [-2.0]]), kind).tolist() == [[0.0], [0.0]]
    assert group_advantage(torch.full((2, 4), 0.25), kind).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_alternatives_of_weight_zero_do_not_touch_the_others(kind):
    reward, weight = normal(3, 6), double([0.3, 0.0, 0.2, 0.4, 0.0, 0.1]).expand(3, -1)
    kept = weight[0] > 0
    alone = group_advantage(reward[:, kept], kind, weight=weight[:, kept])
    for nonsense in (0.0, 1e6, -1e6):
        result = group_advantage(reward.where(kept, nonsense), kind, weight=weight)
        close(result[:, kept], alone)


@pytest.mark.parametrize("kind", RELATIVE)
def test_the_expectation_of_advantages_is_zero_in_every_group(kind):
    reward = normal(50, 6)
    for weight in (None, torch.rand_like(reward).softmax(-1)):
        advantage = group_advantage(reward, kind, weight=weight)
        assert expectation(advantage, weight).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_groups_do_not_touch_one_another(kind):
    reward = normal(4, 2, 5)
    singly = [group_advantage(group, kind, std_floor=0.1) for group in reward.flatten(0, 1)]
    close(group_advantage(reward, kind, std_floor=0.1).flatten(0, 1), torch.stack(singly))


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="'mean'"):
        group_advantage(torch.zeros(1, 2), "mean")


def test_weights_of_the_best_by_hand():
    reward = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 1.0, 2.0, 9.0]])
    assert weight_of_best(reward, 2).tolist() == [[0.0, 0.5, 0.0, 0.5], [0.5, 0.0, 0.0, 0.5]]
    weight = torch.tensor([[0.2, 0.0, 0.3, 0.5], [0.0, 1.0, 0.0, 0.0]])
    wanted = [[0.0, 0.0, 0.5, 0.5], [0.0, 1.0, 0.0, 0.0]]
    assert weight_of_best(reward, 2, weight).tolist() == wanted
    assert weight_of_best(reward, 9).tolist() == [[0.25] * 4] * 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7))
@settings(max_examples=30, deadline=None)
def test_rank_advantages_count_the_worse_and_the_better(values):
    values = double(values)
    worse, better = values < values[:, None], values > values[:, None]
    wanted = (worse.sum(1) - better.sum(1)) / max(len(values) - 1, 1)
    assert group_advantage(values, "rank").tolist() == pytest.approx(wanted.tolist())


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 4), max_size=2),
    st.sampled_from([1, 2, 3, 8, 16, 40]),
    st.sampled_from(["none", "random", "masked"]),
)
@settings(max_examples=80, deadline=None)
def test_rank_advantages_are_those_of_comparing_each_with_each(seed, batch, count, kind):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(5, (*batch, count), generator=generator) / 4  # with ties
    weight = None
    if kind != "none":
        weight = torch.rand(reward.shape, generator=generator)
        if kind == "masked":
            weight = weight * (torch.rand(reward.shape, generator=generator) < 0.6)
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-9)
    close(ADVANTAGES["rank"](reward, weight), rank_advantage(reward, weight))


@given(st.integers(0, 10**6), st.sampled_from([0.5, 5.0, 60.0]))
@settings(max_examples=80, deadline=None)
def test_the_surrogate_has_value_and_gradient_of_the_plain_formula(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    log_prob, old = spread * torch.randn(2, 4, 6, generator=generator)
    advantage = torch.randn(4, 6, generator=generator).round(decimals=1)
    guarded = log_prob.clone().requires_grad_()
    value, cut = clipped_surrogate(guarded, old, advantage, torch.tensor([0.2, 0.3]))
    # the plain formula, in numbers that do not overflow
    plain = log_prob.double().requires_grad_()
    ratio, gain = (plain - old).exp(), advantage.double()
    wanted = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.3) * gain)
    finite = value.isfinite()
    assert finite[advantage >= 0].all()
    assert torch.equal(cut[finite], (ratio * gain > wanted)[finite])
    value[finite].sum().backward()
    wanted[finite].sum().backward()
    for first, second in ((value, wanted), (guarded.grad, plain.grad)):
        torch.testing.assert_close(first[finite], second[finite].float(), rtol=1e-4, atol=1e-6)


def test_the_example_of_an_advantage_differs_from_every_built_in():
    """By more than a factor, which the optimiser would make up for."""
    reward = torch.tensor([1.0, 0.0, 0.5, 0.25])
    below = known_advantage("examples.advantages:below_best")
    assert group_advantage(reward, below).tolist() == [0.0, -1.0, -0.5, -0.75]
    weight = torch.tensor([0.0, 0.5, 0.25, 0.25])
    # what was never drawn is not the best
    assert group_advantage(reward, below, weight=weight).tolist() == [0.5, -0.5, 0.0, -0.25]


def test_an_advantage_of_ones_own_and_what_is_refused():
    own, reward = (
        known_advantage("examples.advantages:leave_one_out"),
        torch.tensor([1.0, 0.0, 0.5]),
    )
    assert group_advantage(reward, own).tolist() == pytest.approx([0.75, -0.75, 0.0])
    # the others of the first are worth 0.25 on the mean
    weighted = group_advantage(reward, own, weight=torch.tensor([0.5, 0.25, 0.25]))
    assert weighted.tolist() == pytest.approx([0.75, -0.8333333, -0.1666667])
    for wrong in (
        lambda reward, weight: reward.mean(-1),  # would be stretched over all contexts
        lambda reward, weight: reward * torch.nan,
    ):
        with input_error("finite"):
            group_advantage(torch.rand(4, 1, 3), wrong)
    # by its name, and not by its address
    with input_error("loss.advantage=<lambda>: "):
        known_advantage(lambda reward, weight: reward.mean())
    for name in ("examples.advantages:loo", "math:sqrt"):
        with input_error("loss.advantage"):
            known_advantage(name)
