"""Attention over training samples: by hand, and never over what a member must not see."""

from __future__ import annotations

import math

import torch

from knobwise.agents.controller.retrieval import Retrieval


def two_points(members: int = 1) -> Retrieval:
    """Remembers x = 0 (accuracy 0, 1 ms) and x = 1 (accuracy 1, e ms); the metric is the feature itself."""
    retrieval = Retrieval(features=1, configurations=1, members=members, samples=3)
    x, accuracy, latency = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [math.e]])
    retrieval.remember(x, accuracy, latency, torch.ones(members, 2, dtype=torch.bool))
    with torch.no_grad():
        retrieval.metric.weight.zero_()
        retrieval.metric.weight[:, 0, 0] = 1.0
        retrieval.metric.bias.zero_()
    return retrieval


def test_by_hand() -> None:
    share, accuracy, log_latency = two_points()(torch.tensor([[[0.5], [0.25]]]))
    torch.testing.assert_close(share, torch.full((1, 2, 1), 1 / (1 + math.e)))
    # squared distances .25 and .25; .0625 and .5625
    of_far = math.exp(-0.5625) / (math.exp(-0.5625) + math.exp(-0.0625))
    expected = torch.tensor([[[0.5], [of_far]]])
    torch.testing.assert_close(accuracy, expected)
    torch.testing.assert_close(log_latency, expected)


def test_a_sample_does_not_retrieve_itself() -> None:
    _, accuracy, _ = two_points()(torch.tensor([[[0.0], [1.0]]]))
    torch.testing.assert_close(accuracy, torch.tensor([[[1.0], [0.0]]]))


def test_a_member_does_not_retrieve_what_was_held_out_of_it() -> None:
    retrieval = two_points(members=2)
    x, accuracy, latency = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]]), torch.ones(2, 1)
    retrieval.remember(x, accuracy, latency, torch.tensor([[True, False], [False, True]]))
    _, found, _ = retrieval(torch.full((2, 1, 1), 0.5))
    torch.testing.assert_close(found, torch.tensor([[[0.0]], [[1.0]]]))


def test_holes_are_filled_with_the_mean_of_the_configuration() -> None:
    retrieval = Retrieval(features=1, configurations=1, members=1, samples=3)
    accuracy = torch.tensor([[0.2], [0.6], [torch.nan]])
    everything = torch.ones(1, 3, dtype=torch.bool)
    retrieval.remember(torch.arange(3.0)[:, None], accuracy, torch.tensor([[1.0], [1.0], [torch.nan]]), everything)
    torch.testing.assert_close(retrieval.accuracy.sort(0).values.squeeze(1), torch.tensor([0.2, 0.4, 0.6]))


def test_where_nothing_may_be_retrieved_it_does_not_count() -> None:
    retrieval = two_points()
    retrieval.usable[:] = torch.tensor([[True, False, False]])
    known = retrieval.points[0].reshape(1, 1, 1)
    share, _, _ = retrieval(torch.cat([known, known + 5], 1))
    assert share[0, 0] == 0
    assert share[0, 1] > 0


def test_no_sample_of_many_retrieves_itself_whatever_the_metric() -> None:
    torch.manual_seed(0)
    retrieval = Retrieval(features=40, configurations=1, members=1, samples=200)
    x = torch.randn(200, 40)
    retrieval.remember(x, torch.rand(200, 1), torch.ones(200, 1), torch.ones(1, 200, dtype=torch.bool))
    with torch.no_grad():
        retrieval.metric.weight.mul_(5)
    retrieval.accuracy = torch.eye(200)  # so that the weights themselves come out
    retrieval.log_latency = retrieval.accuracy
    _, weights, _ = retrieval(retrieval.points.unsqueeze(0))
    assert float(weights[0].diagonal().detach().amax()) == 0.0
