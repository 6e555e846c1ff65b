from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knobwise.agents.controller.actor import ConfigurationCategorical

SOME = torch.tensor([[0, 0], [0, 1], [2, 1]])  # (1, ·), (2, 0) and (0, 2) do not exist


def distribution(*shape: int, group_size: int | None = None, configurations: Tensor = SOME) -> ConfigurationCategorical:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, len(configurations), generator=generator)
    return ConfigurationCategorical(logits, configurations, group_size)


def test_probabilities_sum_to_one_whether_the_logits_did_or_not() -> None:
    torch.testing.assert_close(distribution(4, 2).log_probs.exp().sum(-1), torch.ones(4, 2))


@pytest.mark.parametrize("group_size", [None, 1, 5])
@pytest.mark.parametrize("batch", [(), (4,), (4, 2)])
@pytest.mark.parametrize("sample", [(), (3,), (3, 2)])
def test_shapes_of_draws_and_their_log_probs(
    group_size: int | None, batch: tuple[int, ...], sample: tuple[int, ...]
) -> None:
    dist = distribution(*batch, group_size=group_size)
    group = () if group_size is None else (group_size,)
    drawn = dist.sample(sample)
    assert drawn.shape == (*sample, *batch, *group, 2)
    found = dist.log_prob(drawn)
    assert found.shape == (*sample, *batch, *group)
    # what is drawn exists, and its log-prob is that of its own context
    wanted = dist.log_probs.reshape(*([1] * len(sample)), *batch, *([1] * len(group)), 3).expand(*found.shape, 3)
    torch.testing.assert_close(found, wanted.gather(-1, dist.index(drawn).unsqueeze(-1)).squeeze(-1))
    assert dist.entropy().shape == batch
    assert dist.mode.shape == (*batch, *group, 2)


@pytest.mark.parametrize("group_size", [None, 4])
def test_draws_have_the_frequencies_of_their_context(group_size: int | None) -> None:
    torch.manual_seed(0)
    dist = distribution(2, group_size=group_size)
    drawn = dist.index(dist.sample((20_000,)))  # [20000, 2, (4)]
    for context in range(2):
        seen = drawn[:, context].flatten().bincount(minlength=3) / drawn[:, context].numel()
        torch.testing.assert_close(seen, dist.log_probs[context].exp(), atol=0.015, rtol=0)


def test_actions_that_do_not_exist_have_log_prob_minus_infinity() -> None:
    actions = torch.tensor([[1, 0], [2, 0], [0, 2], [-1, 0], [3, 1], [2, 1]])
    found = distribution().log_prob(actions)
    assert found[:5].tolist() == [-math.inf] * 5
    assert found[5].isfinite()
    assert distribution(group_size=6).log_prob(actions).tolist() == found.tolist()


def test_masked_configurations_are_never_drawn() -> None:
    dist = ConfigurationCategorical(torch.tensor([[0.0, -torch.inf, 0.0]]), SOME, group_size=1000)
    assert set(dist.sample_index().flatten().tolist()) == {0, 2}
    assert dist.entropy().item() == pytest.approx(math.log(2))


def test_mode_is_the_most_probable_action() -> None:
    dist = ConfigurationCategorical(torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]]), SOME)
    assert dist.mode.tolist() == [[0, 1], [2, 1]]
    assert dist.deterministic_sample.tolist() == dist.mode.tolist()
    grouped = ConfigurationCategorical(torch.tensor([1.0, 3.0, 2.0]), SOME, group_size=2)
    assert grouped.mode.tolist() == [[0, 1], [0, 1]]


def test_entropy_is_that_of_torch() -> None:
    p = distribution(4, 2)
    torch.testing.assert_close(p.entropy(), torch.distributions.Categorical(logits=p.log_probs).entropy())


def test_configurations_in_another_order_are_found() -> None:
    shuffled = distribution(configurations=SOME[[2, 0, 1]])
    assert shuffled.log_prob(SOME[[2, 0, 1]]).tolist() == shuffled.log_probs.tolist()


def test_gradient_of_a_log_prob_is_that_of_softmax() -> None:
    logits = torch.tensor([0.2, -0.1, 0.7], requires_grad=True)
    ConfigurationCategorical(logits, SOME).log_prob(torch.tensor([0, 1])).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([0.0, 1.0, 0.0]) - logits.detach().softmax(-1))
