import math

import pytest
import torch

from knobwise.losses.functional import group_advantage
from knobwise.losses.settings import ADVANTAGES

ROUNDING = 2e-7
RELATIVE = [kind for kind in ADVANTAGES if kind != "unnormalised"]


def rewards(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "reward", "wanted"),
    [
        ("centred", [1.0, 2.0, 6.0], [-2.0, -1.0, 3.0]),
        ("zscore", [1.0, 3.0, 1.0, 3.0], [-1.0, 1.0, -1.0, 1.0]),  # population standard deviation 1
        ("zscore", [0.0, 0.0, 6.0], [each / math.sqrt(8) for each in (-2, -2, 4)]),  # variance (4 + 4 + 16)/3
        ("rank", [7.0, -1.0, 3.0], [1.0, -1.0, 0.0]),
        ("rank", [5.0, 5.0, 1.0, 9.0, 5.0], [0.0, 0.0, -1.0, 1.0, 0.0]),  # ties in the middle
        ("rank", [2.0, 2.0, 1.0], [0.5, 0.5, -1.0]),  # 1 − 2·rank/(G − 1), ranks ½, ½, 2
        ("unnormalised", [1.0, 2.0, 6.0], [1.0, 2.0, 5.0]),  # the reward itself, cut at 5, as all of them
        ("unnormalised", [3.7], [3.7]),  # no baseline
    ],
)
def test_draws_by_hand(kind: str, reward: list[float], wanted: list[float]) -> None:
    assert group_advantage(torch.tensor([reward]), kind).tolist()[0] == pytest.approx(wanted, rel=ROUNDING, abs=0)


def test_the_floor_of_zscore_keeps_noise_small() -> None:
    noise = torch.tensor([[0.5, 0.502]])  # deviations ±.001, divided by the floor of .1
    torch.testing.assert_close(group_advantage(noise, "zscore"), torch.tensor([[-0.01, 0.01]]), atol=1e-6, rtol=0)
    found = group_advantage(noise, "zscore", std_floor=1e-4)
    torch.testing.assert_close(found, torch.tensor([[-1.0, 1.0]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("centred", [-1.5, -0.5, 3.5]),  # mean .5 + .5 + 1.5 = 2.5
        ("zscore", [each / math.sqrt(4.25) for each in (-1.5, -0.5, 3.5)]),  # variance .5·2.25 + .25·.25 + .25·12.25
        ("rank", [-0.5, 0.25, 0.75]),  # mass that is worse − mass that is better
        ("unnormalised", [1.0, 2.0, 6.0]),
    ],
)
def test_weighted_by_hand(kind: str, wanted: list[float]) -> None:
    reward, weight = torch.tensor([[1.0, 2.0, 6.0]]), torch.tensor([[0.5, 0.25, 0.25]])
    found = group_advantage(reward, kind, weight=weight, clip=9.0)
    assert found.tolist()[0] == pytest.approx(wanted, rel=ROUNDING, abs=0)


@pytest.mark.parametrize("kind", RELATIVE)
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(kind: str) -> None:
    assert group_advantage(torch.tensor([[3.7], [-2.0]]), kind).tolist() == [[0.0], [0.0]]
    assert group_advantage(torch.full((2, 4), 0.25), kind).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize(("kind", "factor"), [("zscore", 1), ("centred", 1), ("rank", 8 / 7)])
def test_uniform_weights_are_the_same_as_none(kind: str, factor: float) -> None:
    """But for the draw itself, which has no rank against itself."""
    reward = rewards(5, 8)
    weighted = group_advantage(reward, kind, weight=torch.full_like(reward, 1 / 8))
    torch.testing.assert_close(weighted * factor, group_advantage(reward, kind))


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
