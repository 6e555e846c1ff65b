from __future__ import annotations

import math

import pytest
import torch

from knobwise.losses.functional import group_advantage
from knobwise.losses.settings import ADVANTAGES

RELATIVE = [kind for kind in ADVANTAGES if kind != "unnormalised"]


def rewards(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_centred_by_hand() -> None:
    assert group_advantage(torch.tensor([[1.0, 2.0, 6.0]]), "centred").tolist() == [[-2.0, -1.0, 3.0]]


def test_zscore_by_hand() -> None:
    # deviations −1, 1 and −1, 1 around 2: population standard deviation 1
    found = group_advantage(torch.tensor([[1.0, 3.0, 1.0, 3.0]]), "zscore")
    assert found.tolist() == [[-1.0, 1.0, -1.0, 1.0]]
    found = group_advantage(torch.tensor([[0.0, 0.0, 6.0]]), "zscore")  # mean 2, variance (4 + 4 + 16)/3 = 8
    torch.testing.assert_close(found, torch.tensor([[-2.0, -2.0, 4.0]]) / math.sqrt(8))


def test_the_floor_of_zscore_keeps_noise_small() -> None:
    noise = torch.tensor([[0.5, 0.502]])  # deviations ±.001, divided by the floor of .1
    torch.testing.assert_close(group_advantage(noise, "zscore"), torch.tensor([[-0.01, 0.01]]), atol=1e-6, rtol=0)
    found = group_advantage(noise, "zscore", std_floor=1e-4)
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0]]), atol=1e-4, rtol=0)


def test_rank_by_hand_with_ties_in_the_middle() -> None:
    assert group_advantage(torch.tensor([[7.0, -1.0, 3.0]]), "rank").tolist() == [[1.0, -1.0, 0.0]]
    found = group_advantage(torch.tensor([[5.0, 5.0, 1.0, 9.0, 5.0]]), "rank")
    assert found.tolist() == [[0.0, 0.0, -1.0, 1.0, 0.0]]
    found = group_advantage(torch.tensor([[2.0, 2.0, 1.0]]), "rank")  # 1 − 2·rank/(G − 1), ranks ½, ½, 2
    assert found.tolist() == [[0.5, 0.5, -1.0]]


def test_weighted_by_hand() -> None:
    reward, weight = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    # mean .5 + .5 + 1.5 = 2.5; variance .5·2.25 + .25·.25 + .25·12.25 = 4.25
    torch.testing.assert_close(group_advantage(reward, "centred", weight=weight), torch.tensor([[-1.5, -0.5, 3.5]]))
    torch.testing.assert_close(
        group_advantage(reward, "zscore", weight=weight), torch.tensor([[-1.5, -0.5, 3.5]]) / math.sqrt(4.25)
    )
    # mass that is worse − mass that is better
    assert group_advantage(reward, "rank", weight=weight).tolist() == [[-0.5, 0.25, 0.75]]


def test_unnormalised_is_the_reward_itself() -> None:
    reward = torch.tensor([[1.0, 2.0, 6.0]])
    assert group_advantage(reward, "unnormalised").tolist() == [[1.0, 2.0, 5.0]]  # cut at 5, as all of them
    weight = torch.tensor([[0.5, 0.25, 0.25]])
    assert group_advantage(reward, "unnormalised", weight=weight, clip=9.0).tolist() == [[1.0, 2.0, 6.0]]
    assert group_advantage(torch.tensor([[3.7]]), "unnormalised").item() == pytest.approx(3.7)  # no baseline


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(kind: str) -> None:
    assert group_advantage(torch.tensor([[3.7], [-2.0]]), kind).tolist() == [[0.0], [0.0]]
    assert group_advantage(torch.full((2, 4), 0.25), kind).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", ["zscore", "centred"])
def test_uniform_weights_are_the_same_as_none(kind: str) -> None:
    reward = rewards(5, 8)
    uniform = torch.full_like(reward, 1 / 8)
    torch.testing.assert_close(group_advantage(reward, kind, weight=uniform), group_advantage(reward, kind))


def test_uniform_weights_rank_as_draws_do_but_for_the_draw_itself() -> None:
    reward = rewards(5, 8)
    uniform = torch.full_like(reward, 1 / 8)
    torch.testing.assert_close(group_advantage(reward, "rank", weight=uniform) * 8 / 7, group_advantage(reward, "rank"))


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_alternatives_of_weight_zero_do_not_touch_the_others(kind: str) -> None:
    reward, weight = rewards(3, 6), torch.tensor([0.3, 0.0, 0.2, 0.4, 0.0, 0.1], dtype=torch.float64)
    kept = weight > 0
    alone = group_advantage(reward[:, kept], kind, weight=weight[kept].expand(3, -1))
    for nonsense in (0.0, 1e6, -1e6):
        filled = torch.where(kept, reward, nonsense)
        torch.testing.assert_close(group_advantage(filled, kind, weight=weight.expand(3, -1))[:, kept], alone)


@pytest.mark.parametrize("kind", RELATIVE)
def test_the_expectation_of_advantages_is_zero_in_every_group(kind: str) -> None:
    reward, weight = rewards(50, 6), torch.rand(50, 6, dtype=torch.float64).softmax(-1)
    for w in (None, weight):
        found = group_advantage(reward, kind, weight=w)
        mean = found.mean(-1) if w is None else (w * found).sum(-1)
        assert mean.abs().max() < 1e-12


def test_groups_do_not_touch_one_another() -> None:
    reward = rewards(4, 2, 5)
    for kind in ADVANTAGES:
        one_by_one = torch.stack([torch.stack([group_advantage(g, kind) for g in row]) for row in reward])
        torch.testing.assert_close(group_advantage(reward, kind), one_by_one)


def test_advantages_are_cut() -> None:
    assert group_advantage(torch.tensor([[-10.0, 10.0]]), "centred", clip=5.0).tolist() == [[-5.0, 5.0]]
    assert group_advantage(torch.tensor([[-10.0, 10.0]]), "centred", clip=50.0).tolist() == [[-10.0, 10.0]]


def test_no_gradient_goes_through_rewards() -> None:
    reward = rewards(2, 3).requires_grad_()
    assert not group_advantage(reward, "zscore").requires_grad


def test_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*zscore, centred, rank"):
        group_advantage(torch.zeros(1, 2), "mean")


def test_draws_that_are_not_there_do_not_touch_the_others() -> None:
    reward = torch.tensor([[3.0, 1.0, 2.0, 9.0, -7.0], [5.0, 9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False, False], [True, False, False, False, False]])
    for kind in ADVANTAGES:
        found = group_advantage(reward, kind, mask=mask)
        torch.testing.assert_close(found[0, :3], group_advantage(reward[:1, :3], kind)[0])
        if kind != "unnormalised":
            assert found[1, 0] == 0  # a group of one
    assert group_advantage(reward, "rank", mask=mask)[0, :3].tolist() == [1.0, -1.0, 0.0]  # 1 − 2·rank/(n − 1)
