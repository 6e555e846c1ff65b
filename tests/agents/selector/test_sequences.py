import itertools
import math

import pytest
import torch
from helpers import close
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.selector.networks import NETWORKS
from knobwise.agents.selector.sequences import SequenceDistribution
from knobwise.agents.selector.settings import SelectorConfig

NETWORK = {
    "additive": {"update": "additive", "heads": 2},
    "convex": {"update": "convex", "heads": 2},
    "v0": {"version": "v0", "heads": 2},
    "v1": {"version": "v1"},
    "v3": {"version": "v3", "heads": 2},
}
every_network = pytest.mark.parametrize("kind", NETWORK)
MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]) > 0
QUERY, *POOL = torch.randn(5, 4, 5, generator=torch.Generator().manual_seed(1))
FEATURES = QUERY, torch.stack(POOL, 1) * MASK.unsqueeze(-1), MASK


def distribution(shots=3, kind="additive"):
    torch.manual_seed(0)
    config = SelectorConfig(**NETWORK[kind], width=8, temperature=0.3)
    network = NETWORKS[config.version](config, 5).eval()
    return SequenceDistribution(network, network.encode(*FEATURES), shots)


def everything(mask, shots):
    """All sequences of one query: ordered, without repeats, −1 once nothing is left."""
    places = mask.nonzero().flatten().tolist()
    length = min(shots, len(places))
    return [(*s, *[-1] * (shots - length)) for s in itertools.permutations(places, length)]


def log_probs_of(dist, query, shots=3):
    """The log-probs [n] of all sequences of a query."""
    sequences = torch.tensor(everything(MASK[query], shots)).expand(4, -1, -1)
    return dist.log_prob(sequences)[query]


@torch.no_grad()
def step_by_step(net, query, sequence):
    """The log-prob of one sequence of one query: everything encoded for it alone, one candidate
    after the other."""
    encoded = net.encode(*(x[query : query + 1] for x in FEATURES))
    state, total, left = net.start(encoded, 1), 0.0, MASK[query].nonzero().flatten().tolist()
    for place in sequence:
        if place < 0:
            break
        direction = net.point(state)[0, 0]
        scores = {p: float(direction @ encoded.keys[0, p]) / net.temperature for p in left}
        total += scores[place] - math.log(sum(math.exp(score) for score in scores.values()))
        left.remove(place)
        state = net.advance(state, encoded.keys[:, place : place + 1])
    return total


# -- probabilities ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shots", [1, 2, 3])
@every_network
def test_log_probs_are_those_of_a_step_by_step_computation_and_sum_to_one(kind, shots):
    dist = distribution(shots, kind)
    for query, mask in enumerate(MASK):
        result = log_probs_of(dist, query, shots)
        close(result.exp().sum(), 1.0)
        wanted = [step_by_step(dist.network, query, each) for each in everything(mask, shots)]
        close(result, wanted, 1e-5)


def test_a_shorter_sequence_has_the_log_prob_of_its_beginning():
    dist = distribution()
    value = torch.full((4, 3, 3), -1)
    value[0, 0, :2] = torch.tensor([2, 0])
    value[0, 1, :1] = 3
    result = dist.log_prob(value)
    close(result[0], [step_by_step(dist.network, 0, each) for each in ((2, 0), (3,), ())], 1e-5)
    assert (result[1:] == 0).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 5), min_size=3, max_size=3), min_size=1, max_size=4))
def test_any_action_gets_a_number_and_finite_gradients(actions):
    dist = distribution()
    result = dist.log_prob(torch.tensor(actions).expand(4, -1, -1))
    assert not result.isnan().any()
    for mask, row in zip(MASK, result.isfinite().tolist(), strict=True):
        beginnings = {s[:n] + (-1,) * (3 - n) for s in everything(mask, 3) for n in range(4)}
        assert row == [tuple(action) in beginnings for action in actions]
    result.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in dist.network.parameters())


@every_network
def test_draws_carry_the_log_probs_that_log_prob_gives_them_and_never_repeat(kind):
    dist = distribution(kind=kind)
    drawn, log_prob = dist.sample_with_log_prob(5)
    assert drawn.shape == (4, 5, 3)
    assert log_prob.shape == (4, 5)
    assert not drawn.requires_grad
    assert not log_prob.requires_grad
    close(dist.log_prob(drawn).detach(), log_prob)
    assert dist.entropy().shape == (4,)
    assert (dist.mode >= 0).sum(-1).tolist() == [3, 2, 1, 0]


# -- draws -----------------------------------------------------------------------------------------


def test_draws_have_the_frequencies_of_their_probabilities():
    dist = distribution(shots=2)
    drawn, _ = dist.sample_with_log_prob(20_000)
    for query, mask in enumerate(MASK):
        sequences = torch.tensor(everything(mask, 2))
        seen = (drawn[query].unsqueeze(1) == sequences).all(-1).float().mean(0)
        close(seen, log_probs_of(dist, query, 2).exp(), 0.015)


# -- the greedy sequence ---------------------------------------------------------------------------


def test_greedy_takes_the_best_place_at_every_step():
    dist = distribution()
    for query, mask in enumerate(MASK):
        chosen, left = [], mask.nonzero().flatten().tolist()
        while left and len(chosen) < 3:
            best = max(left, key=lambda p: step_by_step(dist.network, query, [*chosen, p]))
            chosen.append(best)
            left.remove(best)
        assert dist.mode[query].tolist() == chosen + [-1] * (3 - len(chosen))


# -- entropy ---------------------------------------------------------------------------------------


def entropy_of(log_probs):
    return -(log_probs.exp() * log_probs).sum()


def test_entropy_is_unbiased():
    exact = distribution()
    encoded = exact.network.encode(*(x[:2].repeat_interleave(4000, 0) for x in FEATURES))
    estimates = SequenceDistribution(exact.network, encoded, 3).entropy().unflatten(0, (2, 4000))
    for row, each in enumerate(estimates):
        wanted = entropy_of(log_probs_of(exact, row))
        assert (each.mean() - wanted).abs() <= 4 * each.std() / math.sqrt(4000) + 1e-5


def test_entropy_of_one_shot_is_exact_of_no_choice_zero_and_changes_no_draws():
    dist = distribution(shots=1)
    close(dist.entropy()[0], entropy_of(log_probs_of(dist, 0, 1)))
    assert dist.entropy()[2:].tolist() == [0, 0]
    dist = distribution()
    torch.manual_seed(3)
    wanted, _ = dist.sample_with_log_prob(20)
    torch.manual_seed(3)
    first = dist.entropy()
    assert torch.equal(dist.entropy(), first)
    assert torch.equal(dist.sample_with_log_prob(20)[0], wanted)
