"""Limits on further costs when a deployed controller decides: alone, in batches, and in front of a
model."""

import asyncio
import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import arrays, identical, input_error, small_table
from replayed import ReplayedModel, untrained

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.calibration.calibrate import cells_to_judge
from knobwise.agents.evaluation.limits import fit_bounds
from knobwise.agents.training.checkpoint import Loaded
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.serving import AdaptiveModel
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.serving.onnx_graph import Deployed
from knobwise.serving.runtime import Runtime

SAMPLES = 60
DEPLOY = [True, False, True, False, True]
DRIFT = (np.linspace(-0.2, 0.3, 12).astype(np.float32), 1.1)


def table_with(costs):
    """A small table whose price grows with its knobs, and unless it is `fixed` with a feature."""
    table = small_table(SAMPLES)
    step = 1 + table.configurations.sum(1).float()
    size = table.features["image_features"][:, :1].mul(2).exp()
    prices = {"usd": 0.001 * step * size, "fixed": (0.001 * step).expand(SAMPLES, -1).contiguous()}
    return replace(table, costs={name: prices[name] for name in costs})


def controller_for(*costs, limits=None, deploy=DEPLOY):
    """A controller with a guard that predicts these costs of a small table; and the table."""
    table = table_with(costs)
    agent = untrained(table, deploy=deploy)
    if costs:
        rows = torch.arange(SAMPLES)
        about = table, rows, agent.controller.normaliser, 0.9
        agent.calibration.costs = fit_bounds(*about)
        agent.calibration.cost_names = list(costs)
    if limits:
        agent.calibration.limits = {"values": limits, "probability": 0.9}
    return agent, table


def request_of(table, row):
    return {name: block[row].numpy() for name, block in table.features.items()}


def some_budgets(table):
    return np.random.default_rng(0).uniform(5, 40, SAMPLES)


@pytest.mark.parametrize("drift", [None, DRIFT])
@pytest.mark.parametrize(
    ("costs", "declared", "given"),
    [
        (["usd"], {"usd": 0.004}, None),
        (["usd"], {"usd": 0.004}, {"usd": 0.002}),
        (["usd"], {}, {"usd": 0.002}),
        (["fixed"], {"fixed": 0.002}, None),
        (["fixed", "usd"], {"fixed": 0.002}, {"usd": 0.003}),
        (["usd"], {"usd": 1e-6}, None),
    ],
)
def test_single_requests_batches_and_masks_agree(costs, declared, given, drift):
    agent, table = controller_for(*costs, limits=declared)
    light, blocks, budgets = agent.decider, arrays(table), some_budgets(None)
    chosen = light.choose(blocks, budgets, None, drift, None, given)
    alone = [
        light.decide_index(request_of(table, row), budget, drift, given)
        for row, budget in enumerate(budgets.tolist())
    ]
    identical(chosen, alone)
    expected = [
        light.decide_expected(request_of(table, row), budget, drift, given)
        for row, budget in enumerate(budgets.tolist())
    ]
    identical(chosen, [each[0] for each in expected])
    # a mask leaves some of what the limits allow, or only what exceeds them
    mask = np.random.default_rng(1).random((SAMPLES, 12)) < 0.3
    mask[:, 5] = True
    of_many = light.choose(blocks, budgets, mask, drift, None, given)
    of_one = []
    by_static = []
    for row, budget in enumerate(budgets.tolist()):
        about = request_of(table, row), budget, drift, given, mask[row]
        of_one.append(light.decide_expected(*about)[0])
        by_static.append(light.static_expected(*about)[0])
        fallen = light.fall_back(budget, drift, given, mask[row])
        assert fallen is None or fallen[0] == of_one[-1] == by_static[-1]
    identical(of_many, of_one)
    both, _ = light.allowed(blocks, SAMPLES, given, mask)
    identical(light.static.choose({}, budgets * light.factor(drift), both), by_static)
    # as a controller without limits whose mask allows nothing else
    allowed, _ = light.allowed(blocks, SAMPLES, given)
    agent.calibration.limits = {}
    free = NumpyController(agent.arrays())
    identical(chosen, free.choose(blocks, budgets, allowed, drift))
    assert allowed[np.arange(SAMPLES), chosen].all()
    assert not allowed.all()


def test_exact_prices_are_kept_whenever_they_can_be():
    agent, table = controller_for("fixed", limits={"fixed": 0.002})
    price = table.costs["fixed"][0].numpy()
    light, blocks, budgets = agent.decider, arrays(table), some_budgets(table)
    for limit in (*np.unique(price).tolist(), 0.0025, 0.0035, 1.0):
        chosen = light.choose(blocks, budgets, cost_limits={"fixed": limit})
        assert (price[chosen] <= np.float32(limit)).all()
    chosen = light.choose(blocks, budgets, cost_limits={"fixed": 0.0005})
    assert (price[chosen] == price.min()).all()


def test_without_limits_nothing_is_exported_and_nothing_changes():
    agent, table = controller_for()
    priced, _ = controller_for("usd")
    plain = agent.arrays()
    assert not [name for name in plain if name.startswith("costs.")]
    assert not {"costs", "limits"} & agent.decider.header.keys()
    blocks, budgets = arrays(table), some_budgets(table)
    identical(agent.decider.choose(blocks, budgets), priced.decider.choose(blocks, budgets))
    assert agent.decider.allowed(blocks, SAMPLES)[0] is None
    assert priced.decider.limits_note(blocks) == ""
    extra = {name for name in priced.arrays() if name not in plain}
    assert extra == {"costs.bias", "costs.floor", "costs.margin", "costs.weight"}


def test_exported_and_saved_controllers_keep_limits(tmp_path):
    agent, table = controller_for("usd", limits={"usd": 0.004})
    agent.export(tmp_path / "controller.npz")
    loaded = NumpyController.load(tmp_path / "controller.npz")
    restored = type(agent).restored(agent.plain())
    blocks, budgets = arrays(table), some_budgets(table)
    chosen = agent.decider.choose(blocks, budgets)
    for other in (loaded, restored.decider):
        identical(other.choose(blocks, budgets), chosen)
        assert other.limits.declared == {"usd": 0.004}
        assert other.digest == agent.decider.digest


def test_it_says_where_nothing_fits_and_where_limits_were_not_calibrated():
    agent, table = controller_for("fixed", limits={"fixed": 0.002})
    light, request = agent.decider, request_of(table, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        light.decide(request, 20.0)
        light.decide(request, 20.0, limits={"fixed": 0.002})
    for limit, words in ((0.0001, "cheapest"), (0.003, "calibrated at fixed=0.002")):
        with pytest.warns(UserWarning, match=words):
            light.decide(request, 20.0, limits={"fixed": limit})
    # static needs no features if costs do not depend on them
    budget = float(light.guard.budgets_ms[1])
    assert light.fall_back(budget)[0] == light.decide_index(request, budget)
    assert not light.reads_features(np.array([budget])).any()
    by_features, _ = controller_for("usd", limits={"usd": 0.004})
    assert "60 of 60" in by_features.decider.limits_note(arrays(table), {"usd": 1e-6})
    assert by_features.decider.fall_back(budget) is None
    assert by_features.decider.reads_features(np.array([budget])).all()


@pytest.mark.parametrize(
    ("costs", "limits", "fault"),
    [
        (["usd"], {"eur": 1.0}, "eur"),
        (["usd"], {"usd": 0.0}, "usd"),
        (["usd"], {"usd": -1.0}, "usd"),
        (["usd"], {"usd": np.nan}, "usd"),
        (["usd"], {"usd": "cheap"}, "usd"),
        (["usd"], {"usd": True}, "usd"),
        ([], {"usd": 1.0}, "profile.costs"),
    ],
)
def test_limits_that_cannot_be_are_refused(costs, limits, fault):
    agent, table = controller_for(*costs)
    request = request_of(table, 0)
    for call in (
        lambda: agent.decider.decide(request, 20.0, limits=limits),
        lambda: agent.decider.choose(arrays(table), some_budgets(table), cost_limits=limits),
        lambda: agent.decider.fall_back(float(agent.decider.guard.budgets_ms[1]), None, limits),
    ):
        with pytest.raises(ValueError, match=fault):
            call()
    with input_error(fault):
        Runtime(agent).decide(Runtime(agent).begin(20.0, limits), request)


# -- in front of a model ---------------------------------------------------------------------------


def test_a_runtime_keeps_limits_also_where_features_fail_and_where_it_explores(tmp_path):
    agent, table = controller_for("usd", limits={"usd": 0.004})
    runtime = Runtime(agent, log=tmp_path / "log", explore=1.0, explore_loss=1.0, seed=0)
    for row in range(20):
        request = request_of(table, row)
        limits = {"usd": 0.003} if row % 2 else None
        pending = runtime.begin(20.0, limits)
        decision = runtime.decide(pending, request)
        many = {name: block[None] for name, block in request.items()}
        allowed = agent.decider.allowed(many, 1, limits)[0][0]
        assert allowed[decision.choice]
        assert ("calibrated at usd=0.004" in decision.limits_note) == (row % 2 == 1)
        runtime.finish(decision, "answer")
        failed = runtime.fail(runtime.begin(20.0, limits))
        missing = {name: np.full_like(block, np.nan) for name, block in many.items()}
        assert agent.decider.allowed(missing, 1, limits)[0][0, failed.choice]
    runtime.log.close()
    (path,) = (tmp_path / "log").glob("requests*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("limits") for row in rows] == [None, {"usd": 0.003}] * 10


def test_exploration_draws_what_is_close_to_the_best_of_what_limits_allow():
    """For this request a forbidden configuration is so much better than the best allowed one that
    hardly any of the allowed ones is within 0.05 of it."""
    agent, table = controller_for("usd", limits={"usd": 0.004}, deploy=[True] * 5)
    request = request_of(table, 11)
    many = {name: block[None] for name, block in request.items()}
    allowed = agent.decider.allowed(many, 1)[0][0]
    log_probs = agent.decider.log_probs(many, np.array([20.0]))[0]
    utility = log_probs / agent.decider.header["sharpness"]
    best = utility[allowed].max()
    wanted = {c for c in np.flatnonzero(allowed) if utility[c] >= best - 0.05}
    assert len(wanted) > 2 > sum(utility[allowed] >= utility.max() - 0.05)
    runtime = Runtime(agent, tracker=False, explore=1.0, explore_loss=0.05, seed=0)
    drawn = set()
    for _ in range(60):
        decision = runtime.decide(runtime.begin(20.0), request, spent_ms=0.0)
        drawn.add(decision.choice)
    assert drawn == wanted
    # within a mask that forbids the best of them too
    mask = np.ones(len(allowed), bool)
    mask[max(wanted, key=lambda c: utility[c])] = False
    for _ in range(20):
        masked = runtime.decide(runtime.begin(20.0, mask=mask), request, spent_ms=0.0)
        assert masked.choice in wanted
        assert mask[masked.choice]


def test_cells_that_judging_needs_are_within_limits():
    agent, table = controller_for("fixed", limits={"fixed": 0.002})
    nothing = np.zeros((0, len(DEPLOY)), np.int64)
    agent.calibration.judged = {
        "rows": np.zeros(0, np.int64),
        "chosen": nothing,
        "static": nothing,
        "cost_ms": 0.0,
    }
    cells = cells_to_judge(agent, table, torch.arange(SAMPLES))
    (allowed,) = np.unique(agent.decider.allowed(arrays(table), SAMPLES)[0], axis=0)
    assert 1 < allowed.sum() < len(allowed)
    assert cells.any(1).all()
    assert not cells[:, ~allowed].any()
    # without limits dearer ones are chosen
    free, _ = controller_for("fixed")
    free.calibration.judged = agent.calibration.judged
    assert cells_to_judge(free, table, torch.arange(SAMPLES))[:, ~allowed].any()


def test_wrapped_callables_and_models_take_limits():
    agent, table = controller_for("fixed", limits={"fixed": 0.003})
    price = {
        tuple(table.configuration(c).items()): p for c, p in enumerate(table.costs["fixed"][0])
    }

    def call(request, **knobs):
        return float(price[tuple(knobs.items())])

    async def call_later(request, **knobs):
        return call(request, **knobs)

    def features(row):
        return request_of(table, row)

    serve = knobwise.wrap(call, agent, features=features)
    later = knobwise.wrap(call_later, agent, features=features)
    model = AdaptiveModel(ReplayedModel(table), agent, cache=4)
    for row in range(10):
        for limit in (0.0015, 0.0025, None):
            limits = limit and {"fixed": limit}
            most = np.float32(limit or 0.003)
            assert serve(row, 20.0, limits) <= most
            assert serve.result(row, budget_ms=20.0, limits=limits).answer <= most
            assert asyncio.run(later(row, 20.0, limits=limits)) <= most
            result = model.answer(Request(row, "?"), 20.0, limits=limits)
            assert price[tuple(result.configuration.items())] <= most
            for each in model.generate([Request(row, "?")] * 2, 20.0, limits=limits):
                assert price[tuple(each.configuration.items())] <= most


def test_a_policy_takes_limits_and_explains_them():
    agent, table = controller_for("usd", limits={"usd": 0.02})
    policy = KnobPolicy(Loaded(agent, "t", "d", {}))
    blocks = arrays(table)
    decided = policy.decide(blocks, 20.0)
    chosen = agent.decider.choose(blocks, np.full(SAMPLES, 20.0))
    assert decided == [policy.configurations[choice] for choice in chosen]
    with pytest.warns(UserWarning, match="cheapest"):
        policy.decide(blocks, 20.0, limits={"usd": 1e-6})
    request = request_of(table, 0)
    with pytest.warns(UserWarning, match="calibrated"):
        explained = policy.decide(request, 20.0, explain=True, limits={"usd": 0.01})
    assert "calibrated at usd=0.02" in explained.reason
    many = {name: block[None] for name, block in request.items()}
    allowed = agent.decider.allowed(many, 1, {"usd": 0.01})[0][0]
    possible = [row["configuration"] for row in explained.expected if row["probability"] > 0]
    assert len(possible) <= allowed.sum()
    assert all(allowed[policy.configurations.index(each)] for each in possible)
    with input_error("eur"):
        policy.decide(request, 20.0, limits={"eur": 1.0})


def test_a_graph_that_would_forget_limits_is_refused():
    pytest.importorskip("onnx")
    agent, _ = controller_for("usd", limits={"usd": 0.004})
    with input_error("budget.limits"):
        Deployed(agent)
