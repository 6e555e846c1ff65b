"""Limits on further costs: an answer above one counts as late."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, input_error, small_table, table_of, trainer_on
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.deployed.limits import CostBounds
from knobwise.agents.evaluation.baselines import Oracle, fit_static
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.agents.evaluation.limits import fit_bounds, further_costs
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import controller_trainer
from knobwise.agents.training.held_out import HeldOut
from knobwise.envs import BudgetConfig
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.rules import Deadline
from knobwise.envs.bandit.settings import TRAINING_REWARD
from knobwise.profiling.design.cell_design import balanced_cells, with_cells

FAST_AND_SLOW = [[1.0, 2.0], [1.0, 2.0], [4.0, 2.0]]
PRICES = [[0.001, 0.003], [0.001, 0.002], [0.001, 0.003]]


class Always:
    """Takes one configuration."""

    def __init__(self, choice):
        self.choice = choice

    def choose(self, features, budgets_ms, mask=None):
        return np.full(len(budgets_ms), self.choice)


def priced(limit=None):
    """The problem of three samples that the second configuration answers right, at prices in
    USD."""
    table = table_of([[0.0, 1.0]] * 3, FAST_AND_SLOW, costs={"usd": torch.tensor(PRICES)})
    return judged(table) if limit is None else judged(table, usd=limit)


def judged(table, **limits):
    """The problem with these limits, in which every configuration may be chosen."""
    return Problem(table, table.split(0.4, 0.3), Deadline(limits))


def limited(table, probability=0.9, **limits):
    """The problem with these limits, as it is trained on."""
    budget = BudgetConfig(limits=limits, limit_probability=probability)
    return problem_of(table, table.split(), budget)


def test_an_answer_above_a_limit_is_late_by_hand():
    problem = priced(0.002)
    rows = torch.arange(3)
    budgets = torch.tensor([2.0, 1.5])
    outcomes = evaluate_policy(Always(1), problem, rows, budgets)
    # at 1.5 ms the second configuration is late anyway; 0.002 is not above the limit
    identical(outcomes.on_time, [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    identical(outcomes.utility, outcomes.on_time)
    # the accuracy and the time of an answer are its own
    identical(outcomes.accuracy, torch.ones(3, 2))
    identical(outcomes.latency_ms, torch.full((3, 2), 2.0))
    # the last sample has no configuration that is both quick and cheap
    identical(outcomes.feasible, [[True, True], [True, True], [False, False]])
    costs = further_costs(problem, rows, outcomes.chosen)
    identical(costs["cost_usd"][:, 0], [0.003, 0.002, 0.003])
    identical(costs["over_usd"][:, 0], [1.0, 0.0, 1.0])


def test_without_limits_nothing_is_different():
    problem = priced()
    table = problem.facts
    same = problem_of(table, problem.split, BudgetConfig())
    assert same.values is same.cells is table
    assert same.allowed is None
    free = replace(table, costs={})
    rows, budgets = torch.arange(3), torch.tensor([2.0, 1.5])
    for choice in (0, 1):
        both = [evaluate_policy(Always(choice), each, rows, budgets) for each in (table, free)]
        for name, values in vars(both[0]).items():
            identical(values, getattr(both[1], name))
    assert further_costs(problem, rows, torch.ones(3, 2, dtype=torch.int64)).keys() == {"cost_usd"}


def test_an_unknown_cost_is_not_above_a_limit_and_counts_nowhere():
    prices = torch.tensor(PRICES)
    prices[0, 1] = torch.nan
    problem = judged(replace(priced().facts, costs={"usd": prices}), usd=0.002)
    outcomes = evaluate_policy(Always(1), problem, torch.arange(1), torch.tensor([2.0]))
    assert outcomes.on_time.item() == 1
    assert further_costs(problem, torch.arange(1), outcomes.chosen)["over_usd"].isnan().all()


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({"limits": {"eur": 1.0}}, "eur"),
        ({"limits": {"usd": 0.0}}, "usd"),
        ({"limits": {"usd": "much"}}, "usd"),
        ({"limits": {"usd": True}}, "usd"),
        ({"limits": [0.1]}, "budget.limits"),
        ({"limits": {"usd": 1.0}, "limit_probability": 1.0}, "limit_probability"),
        ({"limits": {"usd": 1.0}, "constraint": "mean"}, "mean"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(budget, named):
    problem = priced()
    with input_error(named):
        problem_of(problem.facts, problem.split, BudgetConfig(**budget))
    with input_error(named):
        controller_trainer(problem.facts, problem.split, budget=BudgetConfig(**budget))


def test_a_trainer_takes_limits_with_a_problem():
    table, parts = priced().facts, priced().split
    budget = BudgetConfig(limits={"usd": 0.002})
    with input_error("budget.limits: .*problem_of"):
        controller_trainer(table, parts, budget=budget)
    problem = problem_of(table, parts, budget)
    assert controller_trainer(problem).setup.problem is problem


def test_in_a_profile_of_part_of_the_cells_costs_are_predicted_and_estimates_right_on_average():
    whole = small_table(60)
    price = 0.001 * (1 + whole.configurations.sum(1).float()).expand(whole.mask.shape)
    whole = replace(whole, costs={"usd": price.contiguous()})
    cells = balanced_cells(60, whole.num_configurations, 6, 0)
    part = with_cells(whole, cells)
    assert part.costs["usd"][~part.mask].isnan().all()
    problem = problem_of(part, part.split(), BudgetConfig())
    problem = replace(problem, rule=Deadline({"usd": 0.003}))
    costs = problem.values.costs["usd"]
    identical(costs[part.mask], part.costs["usd"][part.mask])
    # a price that depends on the knobs alone is known where it was not measured
    torch.testing.assert_close(costs, whole.costs["usd"], rtol=0.25, atol=0.0)
    rows = torch.arange(60)
    dear = int(price[0].argmax())
    outcomes = evaluate_policy(Always(dear), problem, rows, torch.tensor([1e6]))
    assert outcomes.utility.abs().max() < 1e-6
    chosen = torch.full((60, 1), dear)
    assert float(further_costs(problem, rows, chosen)["over_usd"].mean()) == pytest.approx(1.0)


# -- what may be chosen ----------------------------------------------------------------------------


def test_what_is_allowed_by_hand():
    # two costs of three configurations: bounds are bias + margin + x·weight
    arrays = {
        "bias": np.log([[1.0, 2.0, 4.0], [8.0, 2.0, 1.0]]),
        "margin": np.log([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0]]),
        "weight": np.log([[[1.0, 2.0, 1.0]], [[1.0, 1.0, 1.0]]]),
        "floor": np.log([0.001, 0.001]),
    }
    bounds = CostBounds(arrays, ["usd", "j"])
    x = np.array([[0.0], [1.0]], np.float32)
    # usd is at most 1, 2, 8 where x is 0, and 1, 4, 8 where it is 1; j at most 8, 2, 1
    allowed, fits = bounds.allowed(x, bounds.log_limits({"usd": 2.0}))
    identical(allowed, [[True, True, False], [True, False, False]])
    assert fits.all()
    # no configuration keeps both: they exceed them by the factors 4, 1, 4 and 4, 2, 4
    allowed, fits = bounds.allowed(x, bounds.log_limits({"usd": 2.0, "j": 2.0}))
    identical(allowed, [[False, True, False], [False, True, False]])
    identical(fits, [True, False])
    # inside a mask the cheapest of it
    mask = np.array([[True, False, True], [False, False, True]])
    allowed, fits = bounds.allowed(x, bounds.log_limits({"usd": 0.5}), mask)
    identical(allowed, [[True, False, False], [False, False, True]])
    assert not fits.any()


def test_a_bound_is_kept_by_as_many_as_it_says():
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(3000, 1, generator=generator)
    noise = torch.randn(3000, 2, generator=generator) * torch.tensor([0.1, 1.0])
    price = (size + noise).exp()
    table = table_of(torch.ones(3000, 2), torch.ones(3000, 2), size, costs={"usd": price})
    rows = torch.arange(1500)
    normaliser = FeatureNormaliser.fit(table, rows)
    for probability in (0.5, 0.9):
        arrays = fit_bounds(table, rows, normaliser, probability)
        x = normaliser.of_rows(table, torch.arange(1500, 3000)).numpy()
        bound = arrays["bias"] + arrays["margin"] + x @ arrays["weight"][0]
        kept = price[1500:].log().numpy() <= bound
        np.testing.assert_allclose(kept.mean(0), probability, atol=0.03)


def test_few_errors_have_their_largest_as_margin_and_none_are_kept_by_nobody():
    price = torch.tensor([[1.0, torch.nan], [2.0, torch.nan], [4.0, 1.0], [4.0, 1.0]])
    cells = torch.ones(4, 2)
    table = table_of(cells, cells, costs={"usd": price})
    rows = torch.arange(2)
    arrays = fit_bounds(table, rows, FeatureNormaliser.fit(table, rows), 0.9)
    # ln 1 and ln 2, each predicted by the other: the largest error is ln 2
    np.testing.assert_allclose(arrays["bias"][0, 0], np.log(2) / 2)
    np.testing.assert_allclose(arrays["margin"][0, 0], np.log(2))
    assert arrays["margin"][0, 1] > 100
    assert "weight" not in arrays


def test_no_cost_keeps_any_limit():
    tiny = float(np.finfo(np.float32).tiny)
    for price in (0.001, tiny):
        prices = torch.tensor([price, 0.0]).expand(12, -1).contiguous()
        cells = torch.ones(12, 2)
        table = table_of(cells, cells, torch.arange(12.0).unsqueeze(1), costs={"usd": prices})
        identical(limited(table, usd=price).mask, torch.ones(12, 2, dtype=torch.bool))
        identical(limited(table, usd=price / 2).mask[0], [False, True])
        # far below all that was measured, too
        identical(limited(table, usd=float(np.finfo(np.float32).tiny) / 2).mask[0], [False, True])


def test_what_counts_within_limits_is_what_may_be_chosen():
    table = small_table(60)
    step = 1 + table.configurations.sum(1).float()
    table = replace(table, costs={"usd": (0.001 * step).expand(60, -1).contiguous()})
    bound = limited(table, usd=0.003)
    identical(bound.mask, (step <= 3).expand(60, -1))
    identical(bound.cells.mask, bound.mask)
    assert bound.cells.accuracy[~bound.mask].isnan().all()
    assert bound.cells.latency_ms[~bound.mask].isnan().all()
    identical(bound.cells.accuracy[bound.mask], table.accuracy[bound.mask])
    # facts are facts
    assert bound.facts is bound.values is table
    # if none fits, the cheapest
    identical(limited(table, usd=0.0005).mask, (step == 1).expand(60, -1))
    # static and the oracle keep to it, too
    budgets = np.full(60, 1e3)
    rows = torch.arange(60)
    for policy in (fit_static(bound.cells, rows), Oracle(bound.cells, rows)):
        chosen = policy.choose({}, budgets, bound.mask.numpy())
        assert (step[torch.from_numpy(chosen)] <= 3).all()


@settings(deadline=None, max_examples=60)
@given(
    prices=st.lists(st.floats(0, 2.0**10, width=32), min_size=2, max_size=6),
    limit=st.floats(2.0**-10, 2.0**11, width=32),
    near=st.integers(-1, 6),
    probability=st.floats(0.05, 0.99),
)
def test_a_cost_that_is_known_exactly_is_never_above_a_limit_that_can_be_kept(
    prices, limit, near, probability
):
    price = torch.tensor(prices)
    # a limit is most delicate where it equals a cost, or is one step of float32 above or below
    if 0 <= near < len(prices) and price[near] > 0:
        limit = float(np.nextafter(np.float32(prices[near]), np.float32([0, 1e6][near % 2])))
        limit = prices[near] if near % 3 == 0 else limit
    cells = torch.ones(12, len(prices))
    x = torch.arange(12.0).unsqueeze(1)
    table = table_of(cells, cells, x, costs={"usd": price.expand(12, -1).contiguous()})
    mask = limited(table, probability, usd=limit).mask
    fits = price <= torch.tensor(limit, dtype=torch.float32)
    if fits.any():
        identical(mask, fits.expand(12, -1))
    else:
        identical(mask.sum(1), torch.ones(12, dtype=torch.int64))
        assert (price.expand(12, -1)[mask] == price.min()).all()


def test_what_training_logs_counts_answers_above_a_limit_as_late_by_hand():
    problem = priced(0.002)
    rows, budgets = torch.arange(3), torch.tensor([2.0, 1.5])
    rewards = RewardTable(problem.values, TRAINING_REWARD, cells=problem.cells)
    held_out = HeldOut(problem, [rows], 1, budgets, rewards, "utility")
    # the second configuration, which answers everything, is chosen at both budgets
    policies = torch.tensor([0.1, 0.9]).log().expand(2, 3, 2)
    logged = held_out.validation(policies, logged=True).metrics
    assert logged["Accuracy_Mean"] == 1.0
    # one of six answers is in time and cheap enough; four of six could be
    assert logged["Budget_Violation_Rate"] == pytest.approx(5 / 6)
    assert logged["Utility"] == pytest.approx(1 / 6)
    assert logged["Satisfaction_Feasible"] == pytest.approx(1 / 4)
    # as in the results of a run
    judged = evaluate_policy(Always(1), problem, rows, budgets).metrics()
    assert {name: logged[name] for name in judged} == pytest.approx(judged)


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_so_do_the_draws_of_an_iteration(drift):
    # each sample has copies on slower machines where there is drift
    whole = small_table(60)
    prices = torch.full(whole.mask.shape, 0.001)
    prices[:, 1] = 0.003
    whole = replace(whole, costs={"usd": prices}, accuracy=torch.ones(whole.mask.shape))
    policy = PolicyConfig(hidden=4, drift=drift, guard=False)
    problem = Problem(whole, whole.split(), Deadline({"usd": 0.002}))
    stage = trainer_on(problem, policy).stages[-1]
    rows = torch.tensor([[3], [stage.setup.env.table.num_samples - 1]])
    data = TensorDict(
        {
            "row": rows,
            # the second configuration is above the limit
            "configuration": torch.tensor([[[0, 1]], [[1, 1]]]),
            "budget_ms": torch.full((2, 1), 1e6),
            "next": {"reward": torch.zeros(2, 1, 2)},
        },
        [2, 1],
    )
    logged = stage.metrics(data)
    assert logged["Accuracy_Mean"] == 1.0
    assert logged["Budget_Violation_Rate"] == pytest.approx(3 / 4)
