from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from helpers import blocks, driven_apart, equal_states, small_table, table_of, two_kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.predictors.experts import Experts, Measured, fit_experts
from knobwise.agents.predictors.features import FeatureNormaliser
from knobwise.agents.predictors.folds import folds_of, rows_of_members
from knobwise.agents.stack.stacked_controller import StackedController, fit_priced_stack, fit_stack
from knobwise.agents.stack.weights import HeldOut, stack_weights, weighted
from knobwise.envs.configurations.budgets import default_budgets, judged_worths
from knobwise.envs.tables.profile_table import ProfileTable, Split

FAST = ("ridge", "knn")


def config_of(**settings: object) -> PolicyConfig:
    return PolicyConfig(**{"structure": "utility", "members": 3, "hidden": 8, "experts": FAST, **settings})


def stack_of(table: ProfileTable, rows: Tensor, config: PolicyConfig) -> StackedController:
    network = driven_apart(table, config, rows, by=0.1)
    return fit_stack(table, rows, network, config, default_budgets(table), seed=0)


def owners(table: ProfileTable, rows: Tensor) -> Tensor:
    """The member, of three, that each row was held out of."""
    owner = torch.empty(len(rows), dtype=torch.int64)
    for number, (_, hold) in enumerate(folds_of(table, rows, 0, 3)):
        owner[hold] = number
    return owner


def two_configurations() -> ProfileTable:
    table = two_kinds(60, shown=True)
    return table_of(table.accuracy[:, 1:].tolist(), table.latency_ms[:, 1:].tolist(), table.features["x"])


TABLES = {
    "complete": lambda: small_table(90),
    "holes": lambda: small_table(90, holes=0.6),
    "two configurations": two_configurations,
    "no features": lambda: small_table(60, holes=0.3, features=False),
    "29 samples": lambda: small_table(29, holes=0.2),
}


@functools.cache
def fitted(name: str) -> tuple[ProfileTable, Tensor, StackedController]:
    table = TABLES[name]()
    rows = torch.arange(table.num_samples)[: -table.num_samples // 5]
    return table, rows, stack_of(table, rows, config_of(experts=EXPERTS))


def test_stacks_share_experts_and_are_what_they_would_be_alone() -> None:
    table, rows, config = small_table(90), torch.arange(80), config_of()
    budgets = default_budgets(table)
    experts = Experts.fit(table, rows, budgets, EXPERTS, seed=0)
    network = driven_apart(table, config, rows, by=0.1)
    alone = fit_stack(table, rows, network, config, budgets, seed=0)
    shared, other = (fit_stack(table, rows, network, config, budgets, seed, 0.0, experts) for seed in (0, 1))
    assert [expert.name for expert in shared.experts] == list(FAST)
    assert all(one is another for one, another in zip(shared.experts, other.experts, strict=True))
    assert equal_states(alone, shared)
    assert (alone.guard.rows(), alone.held_out_worth) == (shared.guard.rows(), shared.held_out_worth)  # type: ignore[union-attr]


def test_a_member_decides_alone_where_it_is_worth_more_by_more_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    worth = torch.rand(2, 100, 3, generator=generator)
    perfect, mask = worth.clone(), torch.ones(100, 3, dtype=torch.bool)
    held_out = HeldOut([torch.rand(worth.shape, generator=generator), perfect], worth, mask)
    assert held_out.better_alone(-worth) == 1
    assert held_out.better_alone(perfect) is None  # the same everywhere
    # by hand: in one of 100 samples it is right by 1 where the stack is wrong: mean .01, standard error .01, z = 1
    worth = torch.tensor([1.0, 0.0]).repeat(1, 100, 1)
    joined = worth.clone()
    joined[0, 0] = torch.tensor([0.0, 1.0])
    assert HeldOut([worth], worth, mask[:, :2]).better_alone(joined) is None
    # in four mean .04, standard error .0197, z = 2.03: above the 1.64 of one member, below the 2.13 of three
    joined[0, :4] = torch.tensor([0.0, 1.0])
    assert HeldOut([worth], worth, mask[:, :2]).better_alone(joined) == 0
    assert HeldOut([worth] * 3, worth, mask[:, :2]).better_alone(joined) is None


def saved_and_loaded(stack: StackedController, table: ProfileTable, folder: Path) -> StackedController:
    save_checkpoint(folder / "s.pt", stack, table, {})
    again = load_checkpoint(folder / "s.pt").controller
    assert isinstance(again, StackedController)
    return again


def member_scores(network: Controller, features: Tensor, limit: float) -> Tensor:
    """[M, n, C]."""
    net, members = network.network, network.config.members
    out = net.outcomes(features.expand(members, -1, -1))
    return net.scores(out, torch.full((members, len(features)), limit))


@pytest.mark.parametrize("name", TABLES)
def test_it_is_fitted_whatever_the_table(name: str) -> None:
    table, _, stack = fitted(name)
    assert (stack.weights >= 0).all()
    assert stack.weights.sum().item() == pytest.approx(1)
    assert 0 < stack.held_out_worth <= 1
    expected = () if name == "no features" else EXPERTS  # then nothing but the budget tells
    assert tuple(expert.name for expert in stack.experts) == expected
    assert list(stack.chosen()["weights"]) == ["network", *expected]
    assert stack.guard.budgets_ms.tolist() == pytest.approx(default_budgets(table).tolist())


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), low=st.floats(0.0, 1.0))
def test_it_never_leaves_the_mask(name: str, seed: int, low: float) -> None:
    table, _, stack = fitted(name)
    generator = torch.Generator().manual_seed(seed)
    n, c = table.mask.shape
    mask = torch.rand(n, c, generator=generator) < 0.3
    mask.scatter_(1, torch.randint(c, (n, 1), generator=generator), True)
    budgets = low + 60 * torch.rand(n, generator=generator)
    chosen = stack.choose(table.features, budgets, mask)
    assert chosen.dtype == torch.int64
    assert mask.gather(1, chosen.unsqueeze(1)).all()
    assert torch.equal(chosen, stack.choose(table.features, budgets, mask))


@pytest.mark.parametrize("name", TABLES)
def test_a_loaded_one_decides_like_the_saved_one(name: str, tmp_path: Path) -> None:
    table, _, stack = fitted(name)
    again = saved_and_loaded(stack, table, tmp_path)
    budgets = torch.linspace(3, 40, table.num_samples)
    for mask in (None, table.mask):
        assert torch.equal(again.choose(table.features, budgets, mask), stack.choose(table.features, budgets, mask))
    x = stack.features(table.features, table.num_samples)
    assert all(torch.equal(a, b) for a, b in zip(again.view(x, budgets), stack.view(x, budgets), strict=True))
    assert again.chosen() == stack.chosen()
    assert again.held_out_worth == stack.held_out_worth
    assert again.guard.rows() == stack.guard.rows()


@pytest.mark.parametrize("name", TABLES)
def test_log_probs_are_a_distribution_over_what_the_mask_allows(name: str) -> None:
    table, _, stack = fitted(name)
    n = table.num_samples // 2 * 2
    x, budgets, mask = stack.features(table.features, table.num_samples)[:n], torch.linspace(3, 40, n), table.mask[:n]
    log_probs = stack(x, budgets, mask)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(n).to(log_probs.dtype))
    assert ((log_probs == -torch.inf) == ~mask).all()
    view = stack.view(x, budgets)
    assert torch.equal(log_probs.argmax(-1), view.score.masked_fill(~mask, -torch.inf).argmax(-1))
    square = stack(x.reshape(2, n // 2, x.shape[-1]), budgets.reshape(2, -1), mask.reshape(2, n // 2, -1))
    torch.testing.assert_close(square.reshape(n, -1), log_probs)


# -- what it computes --------------------------------------------------------------------------------------------------


def test_what_it_expects_is_the_weighted_mean_of_its_members() -> None:
    table, rows, stack = fitted("complete")
    x, budgets = stack.features(blocks(table, rows), len(rows)), torch.full((len(rows),), 11.0)
    parts = [member_scores(stack.network, x, 11.0).mean(0)]
    parts += [expert(x).expected_utility(budgets) for expert in stack.experts]
    weights = torch.tensor([0.2, 0.5, 0.0, 0.3, 0.0, 0.0])
    other = StackedController(stack.network, list(stack.experts), weights)
    wanted = 0.2 * parts[0] + 0.5 * parts[1] + 0.3 * parts[3]
    torch.testing.assert_close(other.view(x, budgets).score, wanted)
    assert torch.equal(other.choose(blocks(table, rows), budgets), wanted.argmax(1))
    meets = [expert(x).meets(budgets) for expert in stack.experts]
    alone = StackedController(stack.network, list(stack.experts), torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(alone.view(x, budgets).meets, meets[0])


def test_the_lean_form_is_the_network_alone() -> None:
    table, rows = small_table(60), torch.arange(50)
    stack = stack_of(table, rows, config_of(experts=(), guard=False))
    assert stack.weights.tolist() == [1.0]
    assert (len(stack.experts), stack.guard, stack.static) == (0, None, None)
    x, budgets = stack.features(table.features, 60), torch.full((60,), 9.0)
    score = member_scores(stack.network, x, 9.0).mean(0)
    torch.testing.assert_close(stack.view(x, budgets).score, score)
    assert torch.equal(stack.choose(table.features, budgets), score.argmax(1))


def test_members_of_the_network_speak_of_what_was_held_out_of_them() -> None:
    table = dataclasses.replace(small_table(60, holes=0.3), image_ids=tuple(str(i // 3) for i in range(60)))
    rows = torch.arange(4, 57)
    stack = stack_of(table, rows, config_of(experts=(), guard=False))
    x = stack.features(blocks(table, rows), len(rows))

    def worth(owner: Tensor) -> float:
        total = 0.0
        for budget in default_budgets(table):
            scores = member_scores(stack.network, x, float(budget))[owner, torch.arange(len(rows))]
            chosen = scores.masked_fill(~table.mask[rows], -torch.inf).argmax(1)
            met = table.latency_ms[rows, chosen] <= budget
            total += float((table.accuracy[rows, chosen] * met).mean()) / 5
        return total

    owner = owners(table, rows)
    assert stack.held_out_worth == pytest.approx(worth(owner), abs=1e-6)
    assert all(abs(worth((owner + step) % 3) - worth(owner)) > 1e-3 for step in (1, 2))  # another owner shows


def test_experts_are_weighed_by_what_they_say_out_of_fold() -> None:
    # what an expert says of the rows it was fitted on is better than what it says out of fold: worth must be the latter
    table, rows = small_table(60), torch.arange(60)
    stack = stack_of(table, rows, config_of(experts=("ridge",), guard=False))
    alone = StackedController(stack.network, list(stack.experts), torch.tensor([0.0, 1.0]))
    budgets = default_budgets(table)
    measured = Measured.from_table(table, rows, budgets, 0)
    (family,) = fit_experts(table, measured, stack.normaliser, ("ridge",), 0)
    scores = [family.out_of_fold.expected_utility(b.expand(60)) for b in budgets]
    x = stack.features(table.features, 60)
    inside = [alone.view(x, b.expand(60)).score for b in budgets]
    latency = family.out_of_fold.log_latency
    assert measured.utility(inside, latency) > measured.utility(scores, latency)
    network = torch.stack([member_scores(stack.network, x, float(b)) for b in budgets])
    owner = owners(table, rows)
    weights = stack.weights.float()
    both = [weights[0] * network[i, owner, rows] + weights[1] * scores[i] for i in range(5)]
    assert stack.held_out_worth == pytest.approx(measured.utility(both, latency), abs=1e-6)


def test_the_one_who_knows_gets_the_weight() -> None:
    table = two_kinds(200, shown=True)
    rows = torch.arange(150)
    stack = stack_of(table, rows, config_of())
    assert stack.weights[0] < 0.3  # an untrained network beside two that see which configuration is needed
    test = torch.arange(150, 200)
    budget = torch.full((50,), 16.0)
    chosen = stack.choose(blocks(table, test), budget)
    got = table.accuracy[test, chosen] * (table.latency_ms[test, chosen] <= budget)
    assert got.mean() > 0.9


@functools.cache
def priced() -> tuple[ProfileTable, Tensor, StackedController, tuple[Tensor, Tensor]]:
    table, rows = small_table(90, holes=0.2), torch.arange(70)
    config = config_of(guard=False)
    network = driven_apart(table, config, rows, priced=True, by=0.1)
    return table, rows, *fit_priced_stack(table, rows, network, config, judged_worths(table), seed=0)


def test_at_a_price_accuracy_minus_latency_over_worth_decides(tmp_path: Path) -> None:
    table, _, stack, _ = priced()
    assert (stack.limit_key, stack.priced, stack.guard) == ("worth_ms", True, None)
    x, worths = stack.features(table.features, 90), torch.linspace(2, 300, 90)
    out = stack.network.network.outcomes(x.expand(3, -1, -1))
    members = [(out.accuracy.mean(0), out.latency_ms.mean(0))]
    members += [(e(x).accuracy, e(x).latency_ms) for e in stack.experts]
    accuracy, cost = (sum(float(w) * s[i] for w, s in zip(stack.weights, members, strict=True)) for i in range(2))
    torch.testing.assert_close(stack.predictions(x).costs(), (accuracy, cost))
    score = (accuracy - cost / worths.unsqueeze(1)).masked_fill(~table.mask, -torch.inf)
    assert torch.equal(stack.choose(table.features, worths, table.mask), score.argmax(1))
    log_probs = (stack.network.network.sharpness * score).log_softmax(-1)
    torch.testing.assert_close(stack(x, worths, table.mask), log_probs)
    again = saved_and_loaded(stack, table, tmp_path)
    assert again.limit_key == "worth_ms"
    assert torch.equal(again.choose(table.features, worths), stack.choose(table.features, worths))


@torch.no_grad()
def test_at_a_price_weights_are_those_of_what_was_held_out() -> None:
    table, rows, stack, costs = priced()
    measured = Measured.from_table(table, rows, torch.empty(0), 0)
    fitted_ones = fit_experts(table, measured, stack.normaliser, FAST, 0)
    x = stack.features(blocks(table, rows), 70)
    out = stack.network.network.outcomes(x.expand(3, -1, -1))
    owner = owners(table, rows)
    members = [(out.accuracy[owner, torch.arange(70)], out.latency_ms[owner, torch.arange(70)])]
    members += [(family.out_of_fold.accuracy, family.out_of_fold.latency_ms) for family in fitted_ones]
    worths = judged_worths(table)[:, None, None]
    got = (measured.accuracy - measured.latency_ms / worths).nan_to_num()
    held_out = HeldOut([a - ms / worths for a, ms in members], got, measured.mask)
    torch.testing.assert_close(stack.weights, stack_weights(held_out))
    assert stack.held_out_worth == pytest.approx(held_out.mean_worth(weighted(held_out.scores, stack.weights)))
    # and what it expects of these rows comes from weights that have not seen their fold
    for fit, hold in measured.folds:
        unseen_weights = stack_weights(held_out.take(torch.from_numpy(fit)))
        for unseen, parts in zip(costs, zip(*members, strict=True), strict=True):
            torch.testing.assert_close(unseen[hold], weighted([part[hold] for part in parts], unseen_weights).float())


@pytest.mark.parametrize("profiled", [1.0, 0.1])
def test_noise_looks_like_noise_out_of_fold(profiled: float) -> None:
    """Accuracies are coin flips: what is held out must not look better than it is, also where most cells are holes."""
    generator = torch.Generator().manual_seed(0)
    n, c = 240, 30
    mask = torch.rand(n, c, generator=generator) < profiled
    mask[torch.arange(n), torch.arange(n) % c] = True
    accuracy = (torch.rand(n, c, generator=generator) < 0.5).float().masked_fill(~mask, torch.nan)
    latency_ms = torch.ones(n, c).masked_fill(~mask, torch.nan)
    table = table_of(accuracy.tolist(), latency_ms.tolist(), torch.randn(n, 8, generator=generator))
    rows, budgets = torch.arange(n), torch.tensor([2.0])
    measured = Measured.from_table(table, rows, budgets, 0)
    normaliser = FeatureNormaliser.fit(table, rows)
    for family in fit_experts(table, measured, normaliser, ("ridge", "knn", "random_forest"), 0):
        chosen = family.out_of_fold.accuracy.masked_fill(~mask, -1.0).argmax(1, keepdim=True)
        assert abs(float(accuracy.gather(1, chosen).mean()) - 0.5) < 0.11, family.expert.name  # 3.4 standard errors

    config = PolicyConfig(structure="utility", members=5, hidden=8)
    fitted_rows, held_out = rows_of_members(table, Split(rows[:200], rows[200:], rows[:0]), 5, 0)
    mine = torch.stack([torch.isin(rows, fitted) for fitted in fitted_rows])
    network = Controller.for_table(table, rows, config, member_rows=mine).eval()
    x = network.features(table.features, n)
    got = []
    for member, held in enumerate(held_out):
        inputs = x[held].expand(5, -1, -1), budgets.expand(5, len(held)), mask[held].expand(5, -1, -1)
        with torch.no_grad():
            scores = network.network(*inputs)
        got.append(accuracy[held].gather(1, scores[member].argmax(-1, keepdim=True)))
    assert abs(float(torch.cat(got).mean()) - 0.5) < 0.11


# -- weights -----------------------------------------------------------------------------------------------------------


def tiny(n: int = 40, configurations: int = 3, limits: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What was really got, [B, n, C], a member that knows nothing of it, and a mask that allows everything."""
    generator = torch.Generator().manual_seed(seed)
    worth, noise = torch.rand(2, limits, n, configurations, generator=generator)
    return worth, noise, torch.ones(n, configurations, dtype=torch.bool)


def test_a_perfect_member_beside_a_useless_one_and_beside_a_wrong_one() -> None:
    worth, noise, mask = tiny(400)
    for scores, best in (([worth, noise], 0), ([noise, worth], 1)):
        weights = stack_weights(HeldOut(scores, worth, mask))
        assert weights[best] > 0.99
        assert weights.sum().item() == pytest.approx(1)
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
    first = torch.tensor([[[1.0, 0.0], [0.4, 0.5]]])
    second = first.flip(1)
    worth = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    held_out = HeldOut([first, second], worth, torch.ones(2, 2, dtype=torch.bool))
    assert held_out.mean_worth(first) == held_out.mean_worth(second) == 0.5
    assert held_out.mean_worth(first + second) == 1.0
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
    wanted = stack_weights(HeldOut([m.masked_fill(~mask, 0.0) for m in members], worth.masked_fill(~mask, 0.0), mask))
    for nonsense in (50.0, -50.0):
        spoiled = [m.masked_fill(~mask, nonsense) for m in members]
        result = stack_weights(HeldOut(spoiled, worth.masked_fill(~mask, nonsense), mask))
        torch.testing.assert_close(result, wanted)


def test_members_that_agree_or_are_alone_are_no_trouble() -> None:
    worth, noise, mask = tiny(300)
    flat = torch.ones(2, 300, 3)
    weights = stack_weights(HeldOut([flat, 2 * flat], worth, mask))
    assert weights.sum().item() == pytest.approx(1)
    assert (weights >= 0).all()
    nearly = [noise + 1e-7 * k * worth for k in range(6)]
    weights = stack_weights(HeldOut([*nearly, worth], worth, mask))
    assert weights[:-1].sum() < 0.01
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
