import copy
import functools
import operator
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import arrays, close, equal_states, small_table, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.teacher.outcomes import Prediction
from knobwise.agents.teacher.teacher import MemberPredictions, Teacher, fit_teacher
from knobwise.agents.teacher.weights import HeldOutScores, stack_weights
from knobwise.envs.bandit.budgets import default_budgets, judged_values
from knobwise.envs.bandit.rules import DEADLINES
from knobwise.envs.tables.splits import folds_of

FAST = ("ridge", "knn")
TABLE, ROWS = small_table(90, holes=0.2), torch.arange(80)
CONFIG = PolicyConfig(teacher=True, fold_networks=3, teacher_hidden=8, experts=FAST)


def network_of(table, rows, constraint="deadline"):
    """A teacher without experts that was not trained, whose members differ."""
    mine = torch.ones(3, len(rows), dtype=torch.bool)
    for member, (_, hold) in enumerate(folds_of(table, rows, 0, 3)):
        mine[member, hold] = False
    torch.manual_seed(0)
    normaliser = FeatureNormaliser.fit(table, rows)
    teacher = Teacher.for_table(table, rows, CONFIG, normaliser, mine, constraint).eval()
    for p in teacher.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return teacher


def fitted_on(table, rows, families=FAST, network=None, experts=None):
    network = network or network_of(table, rows)
    config = replace(CONFIG, experts=families)
    return fit_teacher(table, rows, network, config, default_budgets(table), 0, experts=experts)


def normal(teacher, table, rows):
    return teacher.normaliser(table.blocks(rows), len(rows))


TABLES = {
    "complete": lambda: small_table(90),
    "holes": lambda: small_table(90, holes=0.6),
    "no features": lambda: small_table(60, holes=0.3, features=False),
    "29 samples": lambda: small_table(29, holes=0.2),
}


@functools.cache
def fitted(name):
    table = TABLES[name]()
    rows = torch.arange(table.num_samples)[: -table.num_samples // 5]
    return table, rows, fitted_on(table, rows, EXPERTS)


def test_teachers_share_experts_and_are_what_they_would_be_alone():
    experts = Experts.fit(TABLE, ROWS, default_budgets(TABLE), EXPERTS, seed=0, folds=3)
    alone, shared = (fitted_on(TABLE, ROWS, experts=each) for each in (None, experts))
    known = [family.expert for family in experts.of_families(FAST)]
    assert all(map(operator.is_, shared.teacher.experts, known))
    teachers = (alone.teacher, *alone.of_folds), (shared.teacher, *shared.of_folds)
    assert all(map(equal_states, *teachers))


def all_profiled(scores, utility):
    return HeldOutScores(scores, utility, torch.ones(utility.shape[1:], dtype=torch.bool))


def test_a_member_decides_alone_where_it_is_worth_more_by_more_than_chance():
    utility, noise = torch.rand(2, 2, 100, 3)
    held_out = all_profiled([noise, utility.clone()], utility)
    assert held_out.better_alone(-utility) == 1
    assert held_out.better_alone(utility) is None  # the same everywhere
    # by hand: in one of 100 samples it is right by 1 where the stack is wrong: mean .01, standard
    # error .01, z = 1
    utility = torch.tensor([1.0, 0.0]).repeat(1, 100, 1)
    joined = utility.clone()
    joined[0, 0] = torch.tensor([0.0, 1.0])
    assert all_profiled([utility], utility).better_alone(joined) is None
    # in four mean .04, standard error .0197, z = 2.03: above the 1.64 of one member, below the 2.13
    # of three
    joined[0, :4] = torch.tensor([0.0, 1.0])
    assert all_profiled([utility], utility).better_alone(joined) == 0
    assert all_profiled([utility] * 3, utility).better_alone(joined) is None
    # the four are of one of 25 images: the same mean, standard error .04
    images = torch.arange(100) // 4
    assert all_profiled([utility], utility).better_alone(joined, images) is None


def test_it_is_weighed_without_dropout():
    network = network_of(TABLE, ROWS).train()
    assert network.network.dropout.p > 0
    state = torch.get_rng_state()
    fitted_on(TABLE, ROWS, network=network)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", TABLES)
def test_it_is_fitted_whatever_the_table(name):
    _, rows, (teacher, of_folds, fitted_rows, folds) = fitted(name)
    expected = () if name == "no features" else EXPERTS  # then nothing but the limit tells
    for each in (teacher, *of_folds):
        assert tuple(expert.name for expert in each.experts) == expected
        assert list(each.chosen()["weights"]) == ["network", *expected]
    assert [each.networks for each in (teacher, *of_folds)] == [3, 1, 1, 1]
    assert torch.equal(fitted_rows, rows)
    assert torch.cat(folds).sort().values.equal(torch.arange(len(rows)))


# -- what it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("constraint", "limit"), [("deadline", 11.0), ("mean", 40.0)])
@torch.no_grad()
def test_what_it_expects_is_the_weighted_mean_of_its_members(constraint, limit):
    table, rows, (teacher, *_) = fitted("holes")
    x, experts = normal(teacher, table, rows), list(teacher.experts)
    weights = torch.tensor([0.2, 0.5, 0.0, 0.3] + [0.0] * (len(experts) - 3))
    other = Teacher(teacher.network, teacher.normaliser, experts, weights, constraint).eval()
    limits = torch.full((len(rows),), limit)
    members = teacher.network(x.expand(3, -1, -1)).predicted()
    wanted = 0.2 * members.score(limits.expand(3, -1), constraint).mean(0)
    wanted += 0.5 * experts[0](x).score(limits, constraint) + 0.3 * experts[2](x).score(
        limits, constraint
    )
    close(other.mixture(x).score(limits), wanted)
    close(other.expected_utility(x, limits[:, None]).squeeze(1), wanted)
    mask = table.mask[rows]
    for allowed, best in ((None, wanted), (mask.numpy(), wanted.masked_fill(~mask, -torch.inf))):
        chosen = other.choose(arrays(table, rows), limits.numpy(), allowed)
        assert chosen.tolist() == best.argmax(1).tolist()


def test_the_moments_of_a_mixture_by_hand():
    # of ln ms: the mean is 3, the mean square .25·(1 + 0) + .75·(1 + 16) = 13, so the variance 4
    members = torch.tensor([[0.2, 0.6], [0.0, 4.0], [1.0, 1.0]])[..., None, None]
    weights = torch.tensor([0.25, 0.75]).reshape(2, 1, 1)
    moments = MemberPredictions(weights, Prediction(*members), DEADLINES).moments()
    assert torch.cat(moments).flatten().tolist() == pytest.approx([0.5, 3, 2])


def test_where_nothing_is_likely_to_be_on_time_the_fastest_is_taken():
    # a hundredth is enough; where only the second could be on time the mask may forbid it
    meets = torch.tensor([[0.0, 0.011, 0.0], [0.009] * 3, [0.0, 0.5, 0.0]])
    log_latency = torch.tensor([[3.0, 2.0, 1.0]]).expand(3, 3)
    spread = log_latency / torch.special.ndtri(meets).abs()
    prediction = Prediction(torch.tensor([[0.2, 0.9, 0.5]]).expand(3, 3), log_latency, spread)
    alone = Prediction(*(part.unsqueeze(0) for part in prediction))
    mixture, limits = MemberPredictions(torch.ones(1, 1, 1), alone, DEADLINES), torch.ones(3)
    close(prediction.meets(limits), meets)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 1]]) > 0
    assert mixture.choose(limits, mask).tolist() == [1, 2, 2]
    assert mixture.choose(limits).tolist() == [1, 2, 1]
    # where a deadline is hopeless, what is taught is ln ms
    assert mixture.score(limits)[1].tolist() == [-3.0, -2.0, -1.0]


@torch.no_grad()
def test_accuracies_that_were_learned_later_move_every_member():
    table, rows, (teacher, *_) = fitted("complete")
    x, moved = normal(teacher, table, rows), copy.deepcopy(teacher)
    moved.accuracy_logits[3] = -1.0
    before, after = (each.mixture(x).members.accuracy[..., 3] for each in (teacher, moved))
    close(after, (before.clamp(0.01, 0.99).logit() - 1).sigmoid())


# -- what it is fitted on --------------------------------------------------------------------------


def test_the_one_who_knows_gets_the_weight():
    table = two_kinds(200, shown=True)
    rows, test = torch.arange(150), torch.arange(150, 200)
    teacher = fitted_on(table, rows).teacher
    # an untrained network beside two that see which configuration is needed
    assert teacher.weights[0] < 0.3
    chosen = torch.from_numpy(teacher.choose(arrays(table, test), np.full(50, 16.0)))
    got = table.accuracy[test, chosen] * (table.latency_ms[test, chosen] <= 16)
    assert got.mean() > 0.9


@torch.no_grad()
def test_a_teacher_of_a_fold_does_not_know_its_fold():
    """What was measured of a fold changes what all teachers predict but that of this fold."""
    network = network_of(TABLE, ROWS)
    _, hold = folds_of(TABLE, ROWS, 0, 3)[1]
    changed = replace(TABLE, accuracy=TABLE.accuracy.clone())
    changed.accuracy[hold[:2]] = 1 - changed.accuracy[hold[:2]]
    x = normal(network, TABLE, ROWS)
    before, after = (fitted_on(each, ROWS, ("ridge",), network) for each in (TABLE, changed))
    first, second = (
        [each.experts[0](x).accuracy for each in fitted.of_folds] for fitted in (before, after)
    )
    assert list(map(torch.equal, first, second)) == [False, True, False]
    # and its network is the member that was not fitted on it
    alone = [each.network(x[None]).accuracy_logits[0] for each in after.of_folds]
    close(torch.stack(alone), network.network(x.expand(3, -1, -1)).accuracy_logits)


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
def test_the_weights_of_a_fold_have_not_seen_it(constraint, monkeypatch):
    limits = judged_values(TABLE) if constraint == "mean" else default_budgets(TABLE)
    spy = Mock(wraps=stack_weights)
    for module in ("teacher", "weights"):
        monkeypatch.setattr(f"knobwise.agents.teacher.{module}.stack_weights", spy)
    network = network_of(TABLE, ROWS, constraint)
    teacher, of_folds, *_ = fit_teacher(TABLE, ROWS, network, CONFIG, limits, 0)
    seen = [call.args[0] for call in spy.call_args_list]
    # what was got by all samples, and by those of the other folds
    parts = [torch.from_numpy(fit) for fit, _ in folds_of(TABLE, ROWS, 0, 3)]
    under = limits[:, None, None]
    for part, held_out, fitted in zip([*parts, ROWS], seen, [*of_folds, teacher], strict=True):
        accuracy, latency_ms = TABLE.accuracy[part], TABLE.latency_ms[part]
        utility = accuracy * (latency_ms <= under)
        if constraint == "mean":
            utility = accuracy - latency_ms / under
        close(held_out.utility, utility.nan_to_num())
        close(fitted.weights, stack_weights(held_out).float())


# -- weights ---------------------------------------------------------------------------------------


def test_least_squares_by_hand():
    # one sample, inside which utility = 1·a + 3·b, and a and b stand at right angles
    a, b = torch.tensor([[[1.0, -1.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 0.0, 1.0, -1.0]]])
    held_out = all_profiled([a, b], a + 3 * b)
    # least squares ¼ : ¾; greedy selection takes b, whose choice is worth 3, and nothing betters it
    assert stack_weights(held_out).tolist() == pytest.approx([0.125, 0.875])


def test_greedy_takes_what_betters_the_decision_by_hand():
    # two samples: the first member is right of the first and undecided, by a little wrong, of the
    # second; the second member the other way round. Alone each gets ½; one of each gets 1, and so
    # half the weight each
    first = torch.tensor([[[1.0, 0.0], [0.4, 0.5]]])
    second = first.flip(1)
    held_out = all_profiled([first, second], torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]))
    utilities = [held_out.mean_utility(score) for score in (first, second, first + second)]
    assert utilities == [0.5, 0.5, 1.0]
    assert stack_weights(held_out).tolist() == pytest.approx([0.5, 0.5])


def test_neither_the_level_of_a_sample_nor_what_was_not_profiled_matters():
    utility, noise = torch.rand(2, 2, 40, 3)
    mask = torch.rand(40, 3) < 0.6
    mask[range(40), torch.arange(40) % 3] = True
    members = [utility + 0.5 * noise, noise]
    wanted = stack_weights(HeldOutScores(members, utility, mask))
    for nonsense in (50.0, -50.0):
        *spoiled, got = (values.masked_fill(~mask, nonsense) for values in (*members, utility))
        close(stack_weights(HeldOutScores(spoiled, got, mask)), wanted)
    raised = [members[0] + 100 * torch.rand(2, 40, 1), noise]
    close(stack_weights(HeldOutScores(raised, utility, mask)), wanted, 1e-3)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(0, 999), st.booleans())
def test_weights_are_not_negative_and_sum_to_one(k, n, c, seed, equal):
    torch.manual_seed(seed)
    scores = list(torch.randn(k, 2, n, c))
    if equal:
        scores = [scores[0]] * k
    mask = torch.rand(n, c) < 0.5
    mask[:, 0] = True
    weights = stack_weights(HeldOutScores(scores, torch.rand(2, n, c), mask))
    assert (weights.shape, weights.dtype) == ((k,), torch.float64)
    assert (weights >= 0).all()
    assert weights.sum().item() == pytest.approx(1)
