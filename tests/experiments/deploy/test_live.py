import functools
import itertools
import json
import math
import re
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import read_json
from helpers import arrays, driven_apart, input_error
from page_parts import charts_of, data_of, points_of, svg_of
from replayed import small_stack, untrained

from knobwise.agents import DeployedController, PolicyConfig
from knobwise.agents.deployed.promise import Promise
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.common.words import points, quantity
from knobwise.envs import default_budgets
from knobwise.envs.tables.profile_table import Split
from knobwise.experiments.deploy import live, live_promises
from knobwise.experiments.deploy.live import LiveConfig, Server, draw_stream
from knobwise.experiments.deploy.live_promises import Slowed, kept_live
from knobwise.experiments.deploy.live_results import ServedRequest, Stream, live_results
from knobwise.experiments.evidence.schema import LiveFacts, PolicyRow, RunResults
from knobwise.experiments.settings.deployment_options import EvaluateRun
from knobwise.serving import AdaptiveModel
from knobwise.testbeds import builtin_profile
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, ElasticRequests
from knobwise.testbeds.elastic.scenes import SEED, draw_samples

ROOT = Path(__file__).resolve().parents[3]
CHOICES = {"controller": [3, 5], "budget_aware_static": [2, 2], "cheapest": [0, 0]}
SHORT = LiveConfig(requests=10)
CONFIG = PolicyConfig(hidden=8, layers=1)
BUDGETS = torch.tensor([1.0, 2.0])


Case = namedtuple("Case", "table split fitted controller")
"""The built-in profile, what is fitted on it, and a controller."""


@pytest.fixture(scope="module")
def case():
    table = builtin_profile()
    split = table.split()
    return Case(table, split, split.fitted, untrained(table, CONFIG))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(case, config, model=None, **files):
    rows = {f"{part}_rows": rows for part, rows in case.split._asdict().items()}
    save_checkpoint("best.pt", case.controller, case.table, rows)
    about = load_checkpoint("best.pt"), case.table, model or ElasticAdaptive(), ElasticRequests()
    return live.run_live("best.pt", *about, EvaluateRun(stream=config, **files))


def server_of(case, config):
    table, _, fitted, controller = case
    budgets = default_budgets(table)
    stream = stream_of(case, config, budgets)
    model, static = AdaptiveModel(ElasticAdaptive(), controller), fit_static(table, fitted)
    chosen = live.fixed_configurations(table, fitted, budgets)
    return Server(model, static, chosen, stream, ElasticRequests(), config)


def stream_of(case, config, budgets=BUDGETS):
    return draw_stream(case.table, case.split.test, case.fitted, budgets, ElasticRequests(), config)


def test_a_slowed_model_takes_so_many_times_as_long_and_promises_are_judged_by_quarter(
    case, monkeypatch
):
    inner = ElasticAdaptive()
    model = Slowed(inner)
    stage = model.first_stage(ElasticRequests().request(case.table.sample_ids[0]))
    knobs = {"max_crops": 2, "top_k": 1, "num_active_blocks": 3}
    # a clock that goes on by 1 ms whenever it is read, and an answer between two readings
    ticks = itertools.count()
    monkeypatch.setattr(live_promises, "clock_ms", lambda: float(next(ticks)))
    known = inner.answer([stage], knobs)
    monkeypatch.setattr(inner, "answer", lambda *_: known)
    assert model.answer([stage], knobs) == known
    model.factor = 5.0
    (answer,) = model.answer([stage], knobs)
    # 1 ms for the answer, so 4 ms of waiting, and 1 to read the clock
    assert answer == replace(known[0], total_ms=known[0].total_ms + 5)
    # of that 1 ms 0.5 were waits for a rate limit, which do not slow down: 2 ms of waiting
    known = [replace(known[0], uncounted_ms=0.5)]
    (answer,) = model.answer([stage], knobs)
    assert answer == replace(known[0], total_ms=known[0].total_ms + 3)
    # of eight requests two a quarter; the first budget has no promise
    arrays = {
        "budgets_ms": np.array([10.0, 20.0]),
        "planned_ms": np.array([9.0, 18.0]),
        "fixed": np.array([0, 0]),
        "quantiles": np.array([-np.inf, -np.inf]),
        "shares": np.array([0.0, 0.9]),
    }
    promise = Promise(arrays, None)

    def promised_at(limit_ms, drift):
        return promise.promised(limit_ms / drift)

    controller = SimpleNamespace(promise=promise, promised=promised_at)
    budgets_ms = np.array([20.0, 40.0, 40.0, 40.0, 40.0, 40.0, 20.0, 40.0])
    stream = SimpleNamespace(budgets_ms=budgets_ms)
    took = np.array([[9.0, 39.0, 39.0, 41.0, 50.0, 50.0, 9.0, 39.0]])
    # the machine is as fast as half of the profile's, and at the last request a quarter
    drift = np.array([[2.0] * 7 + [4.0]])
    record = {"inference_ms": took, "overhead_ms": 0 * took, "drift": drift}
    record["limit_ms"] = budgets_ms[None]
    rows = kept_live(controller, stream, ["controller"], record, ["controller"])
    shares = [(row["window"], row["requests"], row["on_time"]) for row in rows]
    assert shares == [(1, 1, 1.0), (2, 2, 0.5), (3, 2, 0.0)]
    assert [row["broken"] for row in rows] == [False, False, True]
    controller.promise = None
    assert kept_live(controller, stream, ["controller"], record, ["controller"]) == []


def test_live_decisions_are_those_that_a_replay_under_the_same_drift_makes(case):
    server = server_of(case, replace(SHORT, requests=30))
    stream = server.stream
    assert server.serve() is None
    fields = server.served.items()
    learned, frozen, static = ({key: values[p] for key, values in fields} for p in range(3))
    for i, name in enumerate(stream.ids):
        # the profile holds them in half precision, and a near tie can go either way
        features = server.model.model.first_stage(stream.requests[name]).features
        for served in (learned, frozen):
            request = features, served["limit_ms"][i], served["drift"][i]
            assert server.model.controller.decide_index(*request) == served["choice"][i]
        level = static["drift"][i][0].mean(dtype=float)
        limit_ms = static["limit_ms"][i] * math.exp(-level)
        assert server.static.single(limit_ms) == static["choice"][i]
    assert set(frozen["drift"]) == {None}
    for served in (learned, static):
        assert None not in served["drift"].tolist()  # from its own answers, from the first on
        assert (served["limit_ms"] < stream.budgets_ms).all()  # its own costs are taken off


def check_page(text, results):
    """The page begins with three numbers and the machine, and draws every request."""
    learned = results["rows"][0]
    live = results["live"]
    tiles = re.findall("<b>(.*?)</b>", text.split("<h2>")[0])
    assert tiles == [
        f"{points(learned['over_static'])} points",
        f"{learned['satisfaction_feasible']:.1%}",
        quantity(learned["decision_us_p50"], "µs"),
    ]
    assert f"load {live['machine']['load']:.1f}, jitter" in text
    times, levels, residuals = charts_of(text)[2:]
    svg_of(times, levels, residuals)
    served = max(data_of(times), key=len)
    assert [{key: row[key] for key in live["timeline"][0]} for row in served] == live["timeline"]
    shares = [row["share"] for row in points_of(residuals)]
    assert sum(shares) == pytest.approx(1)
    assert "Live and replay" in text
    assert "The tracker" in text


def test_a_run_prints_and_writes_what_it_found(case, capsys):
    results = run(case, replace(SHORT, clock="cpu"), json="live.json", html="live.html")
    check_page(Path("live.html").read_text(), results)
    assert read_json("live.json") == json.loads(json.dumps(results))
    assert "10 requests" in capsys.readouterr().out
    names = ["controller", "controller_frozen", "budget_aware_static"]
    names += ["best_static", "cheapest", "most_accurate"]
    assert [row["policy"] for row in results["rows"]] == names
    for row in results["rows"]:
        for what in ("accuracy", "satisfaction", "utility"):
            low, high = row[f"{what}_ci95"]
            assert 0 <= low <= row[what] <= high <= 1
    live = results["live"]
    fixed = live["configurations"]
    cheapest = case.table.latency_ms[case.fitted].mean(0).argmin()
    assert fixed["cheapest"] == case.table.configuration(int(cheapest))
    most_accurate = case.table.accuracy[case.fitted].double().mean(0).argmax()
    assert fixed["most_accurate"] == case.table.configuration(int(most_accurate))
    # every answer is the one that the profile recorded
    assert all(row["agrees"] for row in live["agreement"] if row["what"] == "accuracy")
    assert live["decisions"]["as_replayed_at_the_same_limit"] == 1
    overhead = live["overhead"]
    assert results["rows"][0]["decision_us_p50"] == pytest.approx(overhead["decision_us_p50"])
    assert results["rows"][3]["decision_us_p50"] is None  # nothing is decided
    parts = overhead["decision_us_p50"] + overhead["features_and_knobs_us_p50"]
    assert overhead["share_p50"] == pytest.approx(parts / 1e3 / overhead["inference_ms"])


def test_every_key_of_the_file_has_a_type_and_a_meaning(case):
    results = run(case, SHORT)
    assert results.keys() <= RunResults.__annotations__.keys()
    # nothing was promised
    assert results["live"].keys() | {"promises"} == LiveFacts.__annotations__.keys()
    explained = (ROOT / "docs/metrics.md").read_text()
    for row in results["rows"]:
        assert row.keys() <= PolicyRow.__annotations__.keys()
    assert all(f"`live.{key}`" in explained for key in results["live"])


def test_each_policy_is_charged_what_it_takes_and_static_allows_for_it(case, monkeypatch):
    monkeypatch.setattr(live, "WARM_UP", 0)
    server = server_of(case, SHORT)
    answer = server.model.answer

    def slow(*arguments, **options):
        time.sleep(0.02)
        return answer(*arguments, **options)

    monkeypatch.setattr(server.model, "answer", slow)
    assert server.serve() is None
    served = server.served
    overhead, decision = served["overhead_ms"], served["decision_us"]
    assert (overhead[0] > 20).all()  # what its calls take beside the model is charged too
    # the controllers and static, then fixed configurations
    assert (overhead[:3] > decision[:3] / 1e3).all()
    assert (decision[:3] > 0).all()
    assert not overhead[3:].any()
    took = overhead[2]
    spent = [0.0, *(float(np.median(took[:i])) for i in range(1, len(took)))]
    budgets_ms = server.stream.budgets_ms
    limits = np.maximum(budgets_ms - spent, 1e-9)
    np.testing.assert_allclose(served["limit_ms"][2], limits, rtol=1e-6)
    assert (served["limit_ms"][0, 1:] < budgets_ms[1:]).all()


class Waiting(ElasticAdaptive):
    """A model whose answers take 100 ms, after 870 in which it waits for a rate limit."""

    def answer(self, stages, configuration):
        answers = super().answer(stages, configuration)
        return [replace(answer, total_ms=100.0, uncounted_ms=870.0) for answer in answers]


def test_no_policy_pays_for_waits_of_the_model(case, monkeypatch):
    server = server_of(case, SHORT)
    model = AdaptiveModel(Waiting(), case.controller)
    # a clock that goes on by 1 s whenever it is read
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(live, "clock_ms", lambda: float(next(ticks)))
    served = server.by_controller(model, 0)
    assert (served.inference_ms, served.overhead_ms) == (100, 30)


def test_nothing_is_fitted_on_what_is_served(case, monkeypatch):
    names = ("fit_static", "fixed_configurations")
    for name in names:
        monkeypatch.setattr(live, name, Mock(side_effect=getattr(live, name)))
    results = run(case, SHORT)
    for name in names:
        fitted = getattr(live, name).call_args.args[1]
        assert sorted(fitted.tolist()) == sorted(case.fitted.tolist())
    scaled = default_budgets(case.table).double() * results["live"]["speed"]["before"]
    assert all(min(abs(scaled - budget)) < 1e-9 for budget in results["budgets_ms"])


@functools.cache
def small():
    agent, table = small_stack(60)
    return table, agent.decider


def by_hand(slower):
    """Two requests of the first two samples, served as the profile says on a machine that is
    `slower`."""
    table, _ = small()
    rows, choices = [0, 1], np.array([*CHOICES.values()])
    served = {name: np.zeros(choices.shape) for name in ServedRequest._fields}
    served["drift"] = np.full(choices.shape, None)
    served["choice"] = choices
    served["score"] = table.accuracy[rows, choices].numpy()
    served["inference_ms"] = slower * table.latency_ms[rows, choices].double().numpy()
    served["overhead_ms"][0] = 0.5
    served["limit_ms"][0] = 30.0
    return Stream(np.array(rows), np.array([1000.0, 1e-6]), ["0", "1"], {}, {}), served


def judged(stream, record, speed=1.0):
    table, controller = small()
    return live_results(
        Problem.from_table(table), stream, list(CHOICES), record, controller, speed
    )[0]


def test_what_is_served_as_the_profile_says_agrees_with_its_replay():
    table, _ = small()
    results = judged(*by_hand(slower=3.0), speed=3.0)
    live = results["live"]
    assert live["speed"]["during"] == pytest.approx(3.0)
    assert all(row["agrees"] and abs(row["difference"]) < 1e-5 for row in live["agreement"])
    learned = results["rows"][0]
    assert learned["satisfaction"] == 0.5  # one budget is ample and one is hopeless
    assert learned["satisfaction_feasible"] == 1.0
    assert learned["infeasible"] == 0.5
    took_ms = 3 * float(table.latency_ms[[0, 1], [3, 5]].double().mean())
    assert learned["latency_ms_mean"] == pytest.approx(took_ms + 0.5)
    static = results["rows"][1]
    assert learned["over_static"] == pytest.approx(learned["utility"] - static["utility"])
    assert static["over_static"] == 0
    assert static["behind"] == pytest.approx(learned["over_static"])
    assert live["overhead"]["share"] == pytest.approx(0.5 / took_ms)


def test_requests_for_one_sample_are_drawn_together():
    stream, record = by_hand(slower=1.0)
    once = judged(stream, record)["rows"]
    # each request a hundred times
    of_sample = np.repeat([0, 1], 100)
    again = {name: values[:, of_sample] for name, values in record.items()}
    budgets_ms, ids = stream.budgets_ms[of_sample], [stream.ids[i] for i in of_sample]
    many = judged(Stream(stream.rows[of_sample], budgets_ms, ids, {}, {}), again)["rows"]
    for row, wanted in zip(many, once, strict=True):
        for key in ("utility_ci95", "over_static_ci95", "latency_ms_mean_ci95"):
            assert row[key] == pytest.approx(wanted[key])


def test_the_timeline_by_hand():
    stream, record = by_hand(slower=3.0)
    record["log_latency"][0] = np.log(record["inference_ms"][0] / 6)
    record["spread"][0] = 0.5
    # of the level the tracker knows half; before the first answer nothing
    offsets = np.full(small()[0].num_configurations, np.log(3))
    record["drift"][0, 1] = (offsets, 2.0)
    live = judged(stream, record, speed=3.0)["live"]
    took = record["inference_ms"][0] + 0.5
    rows = [[took[0], 1000.0, 1.0, 1.0, np.log(6) / 0.5], [took[1], 0.0, 3.0, 2.0, np.log(2)]]
    for row, wanted in zip(live["timeline"], rows, strict=True):
        assert list(row) == ["latency_ms", "budget_ms", "level", "spread", "residual"]
        assert list(row.values()) == pytest.approx(wanted, abs=1e-3)
    assert live["machine"]["jitter"] == pytest.approx(0, abs=1e-6)


def test_feasibility_and_replayed_decisions_use_the_time_of_this_machine():
    table, controller = small()
    stream, record = by_hand(slower=3.0)
    # enough where it was measured, too little here
    stream.budgets_ms[0] = 2 * float(table.latency_ms[0].min())
    assert judged(stream, record, speed=3.0)["rows"][0]["infeasible"] == 1
    blocks = arrays(table, [0, 1])
    record["limit_ms"][0] = 3 * table.latency_ms.median()
    chosen = controller.choose(blocks, record["limit_ms"][0] / 3)
    assert chosen.tolist() != controller.choose(blocks, record["limit_ms"][0]).tolist()
    record["choice"][0] = chosen
    record["drift"][0, 0] = record["drift"][0, 1] = (np.log(3), 1.0)
    live = judged(stream, record, speed=3.0)["live"]
    assert live["decisions"]["as_replayed_at_the_same_limit"] == 1


def test_the_speed_is_known_as_well_as_the_answers_say():
    stream, record = by_hand(slower=1.0)
    record["inference_ms"] *= np.linspace(1, 2, 6).reshape(3, 2)
    speed = judged(stream, record)["live"]["speed"]
    off = 1.96 * 1.25 * 0.5 / (1.35 * 6**0.5)
    assert speed["during"] == pytest.approx(1.5)
    assert speed["during_ci95"] == pytest.approx([1.5 - off, 1.5 + off])


def test_a_replay_that_is_wrong_is_found_out():
    stream, record = by_hand(slower=1.0)
    record["score"][0] = 1 - record["score"][0]
    record["inference_ms"][1] *= 2
    rows = judged(stream, record)["live"]["agreement"]
    away = {(row["policy"], row["what"]) for row in rows if not row["agrees"]}
    assert {("controller", "accuracy"), ("budget_aware_static", "latency_ms_mean")} <= away
    assert "cheapest" not in dict(away)


def test_a_stream_goes_through_the_test_samples_before_it_repeats(case):
    few = case.split.test[:6]
    about = case._replace(split=Split(few, few, few)), LiveConfig(requests=15)
    stream, again = stream_of(*about), stream_of(*about)
    for part in (stream.rows[:6], stream.rows[6:12]):
        assert sorted(part.tolist()) == sorted(few.tolist())
    assert {*stream.budgets_ms} == {1.0, 2.0}
    assert set(stream.timed) <= set(case.fitted.tolist())
    assert [int(name) for name in stream.ids] == stream.rows.tolist() == again.rows.tolist()


def test_answers_are_scored_as_in_the_profile():
    requests, soft = ElasticRequests(), ElasticRequests(soft=True)
    scenes = enumerate(draw_samples(60, seed=SEED))
    number, right = next((str(i), scene.answer) for i, scene in scenes if "sum?" in scene.question)
    for answer, hard, share in ((right, 1, 1), (right.rpartition(" ")[0], 0, 2 / 3), ("", 0, 0)):
        assert requests.score(number, answer) == hard
        assert soft.score(number, answer) == pytest.approx(share, abs=1e-4)
    assert str(10**6) in requests
    assert "a" not in requests


def test_fresh_samples_are_served_without_a_replay(case, capsys):
    config = replace(SHORT, fresh=True)
    results = run(case, config, html="live.html")
    assert results["live"]["agreement"] == []
    assert results["live"]["machine"]["jitter"] is None
    # which requests are feasible is not known
    assert "infeasible" not in results["rows"][0]
    assert f"<b>{results['rows'][0]['satisfaction']:.1%}</b>" in Path("live.html").read_text()
    assert "replay" not in capsys.readouterr().out
    stream = stream_of(case, replace(config, skip=10))
    assert set(stream.rows.tolist()) == {-1}
    assert sorted(map(int, stream.ids)) == list(range(1510, 1520))


class Failing(ElasticAdaptive):
    """A model whose process ends after some answers."""

    def __init__(self, answers):
        super().__init__()
        self.left = answers

    def answer(self, stages, configuration):
        if self.left == 0:
            raise ConnectionError("the server is gone")
        self.left -= 1
        return super().answer(stages, configuration)


@pytest.mark.parametrize(("answers", "kept"), [(3, 0), (12 + 6 * 5, 4), (12 + 6 * 14, 12)])
def test_what_was_served_before_a_server_died_is_kept(case, monkeypatch, answers, kept):
    monkeypatch.setattr(live, "IN_A_ROW", 4)
    # 26 cells are timed before: 20 to warm up, then 6
    with input_error("ConnectionError"):
        run(case, LiveConfig(requests=16), Failing(answers + 26), json="live.json")
    assert Path("live.json").exists() == (kept > 0)
    if kept:
        assert read_json("live.json")["live"]["requests"] == kept


def test_a_controller_for_mean_budgets_is_refused(case):
    network = driven_apart(case.table, CONFIG, case.fitted[:50], constraint="mean")
    with input_error("mean"):
        run(case._replace(controller=DeployedController(network)), SHORT)


def test_a_controller_with_limits_is_refused(case, monkeypatch):
    load = load_checkpoint

    def limited(path):
        loaded = load(path)
        loaded.controller.calibration.limits = {"values": {"usd": 0.1}, "probability": 0.9}
        return loaded

    monkeypatch.setattr(sys.modules[__name__], "load_checkpoint", limited)
    with input_error("budget.limits"):
        run(case, SHORT)
