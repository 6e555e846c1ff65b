import dataclasses
import functools
import operator

import numpy as np
import pytest
import torch
from helpers import arrays, equal_states, small_table, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.folds import folds_of
from knobwise.agents.predictors.outcomes import Prediction
from knobwise.agents.stack import teacher as teacher_module
from knobwise.agents.stack import weights as weights_module
from knobwise.agents.stack.teacher import Mixture, Teacher, fit_teacher
from knobwise.agents.stack.weights import HeldOut, stack_weights
from knobwise.envs.configurations.budgets import default_budgets, judged_worths

FAST = ("ridge", "knn")


def config_of(**options):
    small = {"members": 3, "teacher_hidden": 8, "experts": FAST}
    return PolicyConfig(teacher=True, **small | options)


def network_of(table, rows, config, sense="deadline"):
    """A teacher without experts that was not trained, whose members differ."""
    mine = torch.ones(config.members, len(rows), dtype=torch.bool)
    for member, (_, hold) in enumerate(folds_of(table, rows, 0, config.members)):
        mine[member, hold] = False
    torch.manual_seed(0)
    normaliser = FeatureNormaliser.fit(table, rows)
    teacher = Teacher.for_table(table, rows, config, normaliser, mine, sense).eval()
    for p in teacher.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return teacher


def fitted_on(table, rows, config, seed=0):
    network = network_of(table, rows, config)
    return fit_teacher(table, rows, network, config, default_budgets(table), seed)


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
    return table, rows, fitted_on(table, rows, config_of(experts=EXPERTS))


def test_teachers_share_experts_and_are_what_they_would_be_alone():
    table, rows, config = small_table(90), torch.arange(80), config_of()
    budgets_ms = default_budgets(table)
    experts = Experts.fit(table, rows, budgets_ms, EXPERTS, seed=0, folds=3)
    about = table, rows, network_of(table, rows, config), config, budgets_ms, 0
    alone, shared = fit_teacher(*about), fit_teacher(*about, experts)
    known = [family.expert for family in experts.of_families(FAST)]
    assert all(map(operator.is_, shared.teacher.experts, known))
    teachers = (alone.teacher, *alone.of_folds), (shared.teacher, *shared.of_folds)
    assert all(map(equal_states, *teachers))


def test_a_member_decides_alone_where_it_is_worth_more_by_more_than_chance():
    worth, noise, mask = tiny(100)
    held_out = HeldOut([noise, worth.clone()], worth, mask)
    assert held_out.better_alone(-worth) == 1
    assert held_out.better_alone(worth) is None  # the same everywhere
    # by hand: in one of 100 samples it is right by 1 where the stack is wrong: mean .01, standard
    # error .01, z = 1
    worth = torch.tensor([1.0, 0.0]).repeat(1, 100, 1)
    joined = worth.clone()
    joined[0, 0] = torch.tensor([0.0, 1.0])
    assert HeldOut([worth], worth, mask[:, :2]).better_alone(joined) is None
    # in four mean .04, standard error .0197, z = 2.03: above the 1.64 of one member, below the 2.13
    # of three
    joined[0, :4] = torch.tensor([0.0, 1.0])
    assert HeldOut([worth], worth, mask[:, :2]).better_alone(joined) == 0
    assert HeldOut([worth] * 3, worth, mask[:, :2]).better_alone(joined) is None


def test_it_is_weighed_without_dropout():
    table, rows, config = small_table(60), torch.arange(50), config_of()
    network = network_of(table, rows, config)
    assert network.network.dropout > 0
    about = table, rows, network.train(), config, default_budgets(table), 0
    state = torch.get_rng_state()
    fit_teacher(*about)
    assert torch.equal(torch.get_rng_state(), state)


def member_scores(teacher, x, limit):
    """[M, n, C]."""
    predicted = teacher.network(x.expand(teacher.members, -1, -1)).predicted()
    return predicted.score(torch.full((teacher.members, len(x)), limit), teacher.sense)


@pytest.mark.parametrize("name", TABLES)
def test_it_is_fitted_whatever_the_table(name):
    _, rows, (teacher, of_folds, fitted_rows, folds) = fitted(name)
    expected = () if name == "no features" else EXPERTS  # then nothing but the limit tells
    for each in (teacher, *of_folds):
        assert (each.weights >= 0).all()
        assert each.weights.sum().item() == pytest.approx(1)
        assert tuple(expert.name for expert in each.experts) == expected
        assert list(each.chosen()["weights"]) == ["network", *expected]
    assert [each.members for each in (teacher, *of_folds)] == [3, 1, 1, 1]
    assert torch.equal(fitted_rows, rows)
    assert torch.cat(folds).sort().values.equal(torch.arange(len(rows)))


# -- what it computes ------------------------------------------------------------------------------


def reweighted(teacher, *weights, sense="deadline"):
    experts = list(teacher.experts)
    padded = [*weights, *[0.0] * (1 + len(experts) - len(weights))]
    about = teacher.network, teacher.normaliser, experts, torch.tensor(padded)
    return Teacher(*about, sense).eval()


@pytest.mark.parametrize(("sense", "limit"), [("deadline", 11.0), ("mean", 40.0)])
@torch.no_grad()
def test_what_it_expects_is_the_weighted_mean_of_its_members(sense, limit):
    table, rows, (teacher, *_) = fitted("holes")
    x = normal(teacher, table, rows)
    limits = torch.full((len(rows),), limit)
    other = reweighted(teacher, 0.2, 0.5, 0.0, 0.3, sense=sense)
    parts = [member_scores(other, x, limit).mean(0)]
    parts += [expert(x).score(limits, sense) for expert in teacher.experts]
    wanted = 0.2 * parts[0] + 0.5 * parts[1] + 0.3 * parts[3]
    torch.testing.assert_close(other.mixture(x).score(limits), wanted)
    torch.testing.assert_close(other.teach(x, limits[:, None]).squeeze(1), wanted)
    mask = table.mask[rows]
    for allowed, best in ((None, wanted), (mask.numpy(), wanted.masked_fill(~mask, -torch.inf))):
        chosen = other.choose(arrays(table, rows), limits.numpy(), allowed)
        assert chosen.tolist() == best.argmax(1).tolist()


def test_the_moments_of_a_mixture_by_hand():
    # of ln ms: the mean is 3, the mean square .25·(1 + 0) + .75·(1 + 16) = 13, so the variance 4
    members = torch.tensor([[0.2, 0.6], [0.0, 4.0], [1.0, 1.0]])[..., None, None]
    weights = torch.tensor([0.25, 0.75]).reshape(2, 1, 1)
    moments = Mixture(weights, Prediction(*members), "deadline").moments()
    assert torch.cat(moments).flatten().tolist() == pytest.approx([0.5, 3, 2])


def test_where_nothing_is_likely_to_be_on_time_the_fastest_is_taken():
    # a hundredth is enough; where only the second could be on time the mask may forbid it
    meets = torch.tensor([[0.0, 0.011, 0.0], [0.009, 0.009, 0.009], [0.0, 0.5, 0.0]])
    log_latency = torch.tensor([[3.0, 2.0, 1.0]]).expand(3, 3)
    spread = log_latency / torch.special.ndtri(meets).abs()
    prediction = Prediction(torch.tensor([[0.2, 0.9, 0.5]]).expand(3, 3), log_latency, spread)
    alone = Prediction(*(part.unsqueeze(0) for part in prediction))
    mixture = Mixture(torch.ones(1, 1, 1), alone, "deadline")
    torch.testing.assert_close(prediction.meets(torch.ones(3)), meets)
    mask = torch.tensor([[True] * 3, [True] * 3, [True, False, True]])
    assert mixture.choose(torch.ones(3), mask).tolist() == [1, 2, 2]
    assert mixture.choose(torch.ones(3)).tolist() == [1, 2, 1]
    # where a deadline is hopeless, what is taught is ln ms
    assert mixture.score(torch.ones(3))[1].tolist() == [-3.0, -2.0, -1.0]


@torch.no_grad()
def test_accuracies_that_were_learned_later_move_every_member():
    table, rows, (teacher, *_) = fitted("complete")
    x = normal(teacher, table, rows)
    moved = reweighted(teacher, *teacher.weights.tolist())
    moved.accuracy_logits[3] = -1.0
    before, after = (each.mixture(x).members.accuracy[..., 3] for each in (teacher, moved))
    right = before.clamp(0.01, 0.99).logit() - 1
    torch.testing.assert_close(after, right.sigmoid())


# -- what it is fitted on --------------------------------------------------------------------------


def test_the_one_who_knows_gets_the_weight():
    table = two_kinds(200, shown=True)
    rows, test = torch.arange(150), torch.arange(150, 200)
    teacher = fitted_on(table, rows, config_of()).teacher
    # an untrained network beside two that see which configuration is needed
    assert teacher.weights[0] < 0.3
    chosen = torch.from_numpy(teacher.choose(arrays(table, test), np.full(50, 16.0)))
    got = table.accuracy[test, chosen] * (table.latency_ms[test, chosen] <= 16)
    assert got.mean() > 0.9


@torch.no_grad()
def test_a_teacher_of_a_fold_does_not_know_its_fold():
    """What was measured of a fold changes what all teachers predict but that of this fold."""
    table, rows = small_table(90), torch.arange(90)
    config = config_of(experts=("ridge",))
    network = network_of(table, rows, config)
    _, hold = folds_of(table, rows, 0, 3)[1]
    changed = dataclasses.replace(table, accuracy=table.accuracy.clone())
    changed.accuracy[hold[:2]] = 1 - changed.accuracy[hold[:2]]
    x = normal(network, table, rows)
    about = rows, network, config, default_budgets(table), 0
    before, after = (fit_teacher(each, *about) for each in (table, changed))
    same = []
    for teachers in zip(before.of_folds, after.of_folds, strict=True):
        same.append(torch.equal(*(teacher.experts[0](x).accuracy for teacher in teachers)))
    assert same == [False, True, False]
    everything = network.network(x.expand(3, -1, -1))
    for member, each in enumerate(after.of_folds):
        # and its network is the member that was not fitted on it
        alone = each.network(x[None])
        torch.testing.assert_close(alone.accuracy_logits[0], everything.accuracy_logits[member])
        assert torch.equal(before.folds[member], after.folds[member])


@pytest.mark.parametrize("sense", ["deadline", "mean"])
def test_the_weights_of_a_fold_have_not_seen_it(sense, monkeypatch):
    table, rows, config = small_table(90, holes=0.2), torch.arange(70), config_of()
    limits = judged_worths(table) if sense == "mean" else default_budgets(table)
    seen = []

    def noted(held_out):
        seen.append(held_out)
        return stack_weights(held_out)

    for module in (teacher_module, weights_module):
        monkeypatch.setattr(module, "stack_weights", noted)
    network = network_of(table, rows, config, sense)
    teacher, of_folds, *_ = fit_teacher(table, rows, network, config, limits, 0)
    # what was got by all samples, and by those of the other folds
    parts = [torch.from_numpy(fit) for fit, _ in folds_of(table, rows, 0, 3)]
    under = limits[:, None, None]
    for part, held_out, fitted in zip([*parts, rows], seen, [*of_folds, teacher], strict=True):
        accuracy, latency_ms = table.accuracy[part], table.latency_ms[part]
        worth = accuracy * (latency_ms <= under)
        if sense == "mean":
            worth = accuracy - latency_ms / under
        torch.testing.assert_close(held_out.worth, worth.nan_to_num())
        torch.testing.assert_close(fitted.weights, stack_weights(held_out).float())


# -- weights ---------------------------------------------------------------------------------------


def tiny(n=40):
    """What was really got, [2, n, 3], a member that knows nothing of it, and a mask that allows
    everything."""
    worth, noise = torch.rand(2, 2, n, 3)
    return worth, noise, torch.ones(n, 3, dtype=torch.bool)


def test_least_squares_by_hand():
    # one sample, inside which worth = 1·a + 3·b, and a and b stand at right angles
    a, b = torch.tensor([[[1.0, -1.0, 0.0, 0.0]]]), torch.tensor([[[0.0, 0.0, 1.0, -1.0]]])
    held_out = HeldOut([a, b], a + 3 * b, torch.ones(1, 4, dtype=torch.bool))
    # least squares ¼ : ¾; greedy selection takes b, whose choice is worth 3, and nothing betters it
    assert stack_weights(held_out).tolist() == pytest.approx([0.125, 0.875])


def test_greedy_takes_what_betters_the_decision_by_hand():
    # two samples: the first member is right of the first and undecided, by a little wrong, of the
    # second; the second member the other way round. Alone each gets ½; one of each gets 1, and so
    # half the weight each
    first = torch.tensor([[[1.0, 0.0], [0.4, 0.5]]])
    second = first.flip(1)
    worth = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    held_out = HeldOut([first, second], worth, torch.ones(2, 2, dtype=torch.bool))
    assert held_out.mean_worth(first) == held_out.mean_worth(second) == 0.5
    assert held_out.mean_worth(first + second) == 1.0
    assert stack_weights(held_out).tolist() == pytest.approx([0.5, 0.5])


def test_neither_the_level_of_a_sample_nor_what_was_not_profiled_matters():
    worth, noise, _ = tiny()
    mask = torch.rand(40, 3) < 0.6
    mask[torch.arange(40), torch.arange(40) % 3] = True
    members = [worth + 0.5 * noise, noise]
    wanted = stack_weights(HeldOut(members, worth, mask))
    for nonsense in (50.0, -50.0):
        *spoiled, got = (values.masked_fill(~mask, nonsense) for values in (*members, worth))
        torch.testing.assert_close(stack_weights(HeldOut(spoiled, got, mask)), wanted)
    raised = [members[0] + 100 * torch.rand(2, 40, 1), noise]
    torch.testing.assert_close(
        stack_weights(HeldOut(raised, worth, mask)), wanted, atol=1e-3, rtol=0
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 4), st.integers(0, 999), st.booleans())
def test_weights_are_not_negative_and_sum_to_one(k, n, c, seed, equal):
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
