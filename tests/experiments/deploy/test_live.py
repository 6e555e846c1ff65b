from __future__ import annotations

import functools
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import small_table
from replayed import small_stack, untrained

from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.deploy import live
from knobwise.experiments.deploy.live import LiveConfig, Server, draw_stream
from knobwise.experiments.deploy.live_results import Record, Served, Stream, live_results
from knobwise.experiments.report import live as live_report
from knobwise.profiling.elastic.adapter import ElasticAdaptive, ElasticRequests
from knobwise.profiling.elastic.scenes import SEED, TOKEN, draw_samples, to_words

SHORT = LiveConfig(requests=10, calibration=6, warm_up=1)


class Case(NamedTuple):
    """The built-in profile, what is fitted on it, and a controller."""

    table: ProfileTable
    split: Split
    fitted: torch.Tensor
    controller: DeployedController


@pytest.fixture(scope="module")
def case() -> Case:
    table = builtin_profile()
    split = table.split()
    controller = untrained(table, PolicyConfig(hidden=8, layers=1))
    return Case(table, split, torch.cat([split.train, split.validation]), controller)


def saved(path: Path, controller: DeployedController, table: ProfileTable, split: Split) -> Path:
    save_checkpoint(
        path, controller, table, {f"{part}_rows": rows for part, rows in split._asdict().items()}
    )
    return path


def run(checkpoint: Path, table: ProfileTable, config: LiveConfig) -> dict[str, Any]:
    return live.run_live(checkpoint, table, ElasticAdaptive(), ElasticRequests(), config)


def server_of(case: Case, config: LiveConfig, fixed: int = 3) -> tuple[Stream, Server]:
    table, split, fitted, controller = case
    budgets = default_budgets(table)
    requests = ElasticRequests()
    stream = draw_stream(table, split.test, fitted, budgets, requests, config)
    model, static = AdaptiveModel(ElasticAdaptive(), controller), static_of(table, fitted)
    chosen = live.fixed_configurations(table, fitted, budgets, fixed)
    return stream, Server(model, static, chosen, stream, requests, config)


@pytest.fixture(scope="module")
def served(case: Case) -> tuple[Stream, Record]:
    stream, server = server_of(case, SHORT)
    assert server.serve() is None
    return stream, server.record


def test_live_answers_are_those_that_the_profile_recorded(
    case: Case, served: tuple[Stream, Record]
) -> None:
    stream, record = served
    recorded = case.table.accuracy.numpy()[
        stream.rows[:, None], record.served["choice"].astype(int)
    ]
    assert np.array_equal(record.served["score"].astype(np.float32), recorded)


def test_live_decisions_are_those_that_a_replay_under_the_same_drift_makes(case: Case) -> None:
    stream, server = server_of(case, replace(SHORT, requests=30))
    assert server.serve() is None
    record, table = server.record, case.table
    blocks = [
        {name: block[row].numpy() for name, block in table.features.items()} for row in stream.rows
    ]
    of_policy = [
        record.policies.index(name)
        for name in ("controller", "controller_frozen", "budget_aware_static")
    ]
    learned, frozen, static = (
        {key: record.served[key][p, :, 0].tolist() for key in Served._fields} for p in of_policy
    )
    for served in (learned, frozen):
        cells = zip(blocks, served["limit_ms"], served["drift"], strict=True)
        assert served["choice"] == [server.model.controller.decide_index(*cell) for cell in cells]
    by_static = server.static.static
    for limit, drift, choice in zip(
        static["limit_ms"], static["drift"], static["choice"], strict=True
    ):
        assert by_static.single(limit * math.exp(-drift[0].mean(dtype=float))) == choice
    assert set(frozen["drift"]) == {None}
    assert None not in (
        *learned["drift"],
        *static["drift"],
    )  # each learns from its own answers, from the first on
    assert (np.array(learned["limit_ms"]) < stream.budgets_ms).all()  # its own costs are taken off
    assert (np.array(static["limit_ms"]) < stream.budgets_ms).all()


def test_a_run_prints_and_writes_what_it_found(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved(tmp_path / "best.pt", case.controller, case.table, case.split)
    files = {name: str(tmp_path / f"live.{name}") for name in ("json", "html")}
    results = live.run_live(
        checkpoint,
        case.table,
        ElasticAdaptive(),
        ElasticRequests(),
        replace(SHORT, **files, repeats=2, clock="cpu"),
    )
    assert json.loads((tmp_path / "live.json").read_text()) == json.loads(json.dumps(results))
    page = (tmp_path / "live.html").read_text()
    assert "simulated request stream" in page
    assert "Live and replay" in page
    printed = capsys.readouterr().out
    assert "Simulated stream: 10 requests × 2, each after the previous one" in printed
    for words in (
        "learned controller",
        "budget-aware static",
        "cheapest",
        "most accurate",
        "The controller added",
        "replay",
    ):
        assert words in printed
    assert [row["policy"] for row in results["rows"]] == [
        *(
            "controller",
            "controller_frozen",
            "budget_aware_static",
            "best_static",
            "cheapest",
            "most_accurate",
        )
    ]
    for row in results["rows"]:
        for what in ("accuracy", "satisfaction", "utility"):
            low, high = row[f"{what}_ci95"]
            assert 0 <= low <= row[what] <= high <= 1
        assert row["utility"] <= min(row["accuracy"], row["satisfaction"])
    assert all(row["agrees"] for row in results["agreement"] if row["what"] == "accuracy")
    assert results["decisions"]["as_replayed_at_the_same_limit"] == 1
    overhead = results["overhead"]
    assert overhead["share"] == pytest.approx(
        overhead["overhead_us"] / 1e3 / overhead["inference_ms"]
    )
    parts = overhead["decision_us_p50"] + overhead["features_and_knobs_us_p50"]
    assert overhead["share_p50"] == pytest.approx(parts / 1e3 / overhead["inference_ms"])


def test_the_controller_is_charged_its_whole_way_and_static_its_choice(
    served: tuple[Stream, Record],
) -> None:
    _, record = served
    overhead, decision = record.served["overhead_ms"], record.served["decision_us"]
    assert (overhead[:3] > decision[:3] / 1e3).all()
    assert (decision[:3] > 0).all()
    assert (overhead[3:] == 0).all()
    assert (record.served["inference_ms"] > 0).all()


def test_what_calls_take_beside_the_model_is_charged_too(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = server_of(case, replace(SHORT, requests=3, warm_up=0), fixed=0)
    answer = server.model.answer

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return answer(*arguments, **options)

    monkeypatch.setattr(server.model, "answer", slow)
    assert server.serve() is None
    assert (server.record.served["overhead_ms"][0] > 20).all()


def test_static_allows_for_what_its_own_choices_took(case: Case) -> None:
    stream, server = server_of(case, replace(SHORT, warm_up=0), fixed=1)
    assert server.serve() is None
    served = server.record.served
    took = served["overhead_ms"][2, :, 0]
    spent = [float(np.median(took[:i])) if i else 0.0 for i in range(len(took))]
    np.testing.assert_allclose(
        served["limit_ms"][2, :, 0], np.maximum(stream.budgets_ms - spent, 1e-9), rtol=1e-6
    )
    assert (served["limit_ms"][0, 1:, 0] < stream.budgets_ms[1:]).all()


def test_nothing_is_fitted_on_what_is_served(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, split, everything, controller = case
    calls = {"static_of": static_of, "fixed_configurations": live.fixed_configurations}
    noted = {name: Mock(side_effect=call) for name, call in calls.items()}
    for name, mock in noted.items():
        monkeypatch.setattr(live, name, mock)
    results = run(saved(tmp_path / "best.pt", controller, table, split), table, SHORT)
    assert "The controller answered" in capsys.readouterr().out
    for mock in noted.values():
        assert sorted(mock.call_args.args[1].tolist()) == sorted(everything.tolist())
    scaled = default_budgets(table).double() * results["speed"]["before"]
    assert all(min(abs(scaled - budget)) < 1e-9 for budget in results["budgets_ms"])


def test_fixed_configurations_are_what_their_names_say(case: Case) -> None:
    table, split, *_ = case
    fixed = live.fixed_configurations(table, split.train, default_budgets(table), 3)
    accuracy, latency = (
        table.accuracy[split.train].double().mean(0),
        table.latency_ms[split.train].double().mean(0),
    )
    assert (fixed["cheapest"], fixed["most_accurate"]) == (
        int(latency.argmin()),
        int(accuracy.argmax()),
    )
    assert list(live.fixed_configurations(table, split.train, default_budgets(table), 1)) == [
        "best_static"
    ]


@functools.cache
def small() -> tuple[ProfileTable, NumpyController]:
    agent, table = small_stack(60)
    return table, agent.decider


def by_hand(slower: float) -> tuple[Stream, Record]:
    """Two requests of the first two samples, served as the profile says on a machine that is
    `slower`."""
    table, _ = small()
    rows, choices = (
        np.array([0, 1]),
        {"controller": [3, 5], "budget_aware_static": [2, 2], "cheapest": [0, 0]},
    )
    shape = (len(choices), 2, 1)
    fields: dict[str, Any] = {name: np.zeros(shape) for name in Served._fields} | {
        "drift": np.full(shape, None)
    }
    for p, chosen in enumerate(choices.values()):
        fields["choice"][p, :, 0] = chosen
        fields["score"][p, :, 0] = table.accuracy[rows, chosen]
        fields["inference_ms"][p, :, 0] = slower * table.latency_ms[rows, chosen].double()
    fields["overhead_ms"][0] = 0.5
    fields["limit_ms"][0, :, 0] = 30.0
    return Stream(rows, np.array([1000.0, 1e-6]), ["0", "1"], {}, {}), Record(list(choices), fields)


def judged(stream: Stream, record: Record, speed: float) -> dict[str, Any]:
    table, controller = small()
    return live_results(table, stream, record, controller, speed)


def test_what_is_served_as_the_profile_says_agrees_with_its_replay() -> None:
    table, _ = small()
    results = judged(*by_hand(slower=3.0), speed=3.0)
    assert results["speed"]["during"] == pytest.approx(3.0)
    assert all(row["agrees"] for row in results["agreement"])
    assert all(abs(row["difference"]) < 1e-5 for row in results["agreement"])
    learned = results["rows"][0]
    assert learned["satisfaction"] == 0.5  # one budget is ample and one is hopeless
    assert learned["satisfaction_feasible"] == 1.0
    assert results["infeasible"] == 0.5
    both = table.latency_ms[torch.tensor([0, 1]), torch.tensor([3, 5])].double()
    assert learned["latency_ms"] == pytest.approx(float(3 * both.mean()) + 0.5)
    assert results["overhead"]["share"] == pytest.approx(0.5 / float(3 * both.mean()))


def test_feasibility_and_replayed_decisions_use_the_time_of_this_machine() -> None:
    table, controller = small()
    stream, record = by_hand(slower=3.0)
    stream.budgets_ms[0] = 2 * float(
        table.latency_ms[0].min()
    )  # enough where it was measured, too little here
    assert judged(stream, record, speed=3.0)["infeasible"] == 1
    blocks = {name: block[:2].numpy() for name, block in table.features.items()}
    stream.budgets_ms[:] = 3 * table.latency_ms.median()
    chosen = controller.choose(blocks, stream.budgets_ms / 3)
    assert chosen.tolist() != controller.choose(blocks, stream.budgets_ms).tolist()
    record.served["choice"][0, :, 0] = chosen
    for i in range(2):
        record.served["drift"][0, i, 0] = (np.log(3), 1.0)
    assert judged(stream, record, speed=3.0)["decisions"]["as_replayed_at_the_whole_budget"] == 1


def test_the_speed_is_known_as_well_as_the_answers_say() -> None:
    stream, record = by_hand(slower=1.0)
    record.served["inference_ms"] *= np.linspace(1, 2, 6).reshape(3, 2, 1)
    speed = judged(stream, record, speed=1.0)["speed"]
    off = 1.96 * 1.25 * 0.5 / (1.35 * 6**0.5)
    assert speed["during"] == pytest.approx(1.5)
    assert speed["during_ci95"] == pytest.approx([1.5 - off, 1.5 + off])


def test_a_replay_that_is_wrong_is_found_out() -> None:
    stream, record = by_hand(slower=1.0)
    record.served["score"][0] = 1 - record.served["score"][0]
    record.served["inference_ms"][1] *= 2
    results = judged(stream, record, speed=1.0)
    away = {(row["policy"], row["what"]) for row in results["agreement"] if not row["agrees"]}
    assert {("controller", "accuracy"), ("budget_aware_static", "latency_ms")} <= away
    assert not any(policy == "cheapest" for policy, _ in away)
    results |= {"repeats": 1, "clock": "wall"}
    assert "they differ in " in live_report.verdict(results)[-1]


def test_a_stream_goes_through_the_test_samples_before_it_repeats(case: Case) -> None:
    table, split, *_ = case
    few, budgets = split.test[:6], torch.tensor([1.0, 2.0])
    config = LiveConfig(requests=15, calibration=4)
    stream, again = (
        draw_stream(table, few, split.train, budgets, ElasticRequests(), config) for _ in range(2)
    )
    assert (
        sorted(stream.rows[:6].tolist())
        == sorted(stream.rows[6:12].tolist())
        == sorted(few.tolist())
    )
    assert set(stream.budgets_ms.tolist()) == {1.0, 2.0}
    assert len(stream.timed) == 4
    assert set(stream.timed) <= set(split.train.tolist())
    assert [int(name) for name in stream.ids] == stream.rows.tolist()
    assert stream.rows.tolist() == again.rows.tolist()


def test_answers_are_scored_as_in_the_profile() -> None:
    requests, soft = ElasticRequests(), ElasticRequests(soft=True)
    scenes = draw_samples(60, seed=SEED)
    number = next(i for i, scene in enumerate(scenes) if scene.questions == ("sum",))
    right = to_words(scenes[number].answers[0])
    for words, hard, share in ((right, 1, 1), (right[:2], 0, 2 / 3), ([], 0, 0)):
        assert requests.score(str(number), " ".join(words)) == hard
        assert soft.score(str(number), " ".join(words)) == pytest.approx(share, abs=1e-4)
    assert all(word in TOKEN for word in right)
    assert str(10**6) in requests
    assert "a" not in requests


def test_fresh_samples_are_served_without_a_replay(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(SHORT, fresh=True, html=str(tmp_path / "live.html"))
    results = run(
        saved(tmp_path / "best.pt", case.controller, case.table, case.split), case.table, config
    )
    assert results["agreement"] == []
    assert results["infeasible"] is None
    assert len(results["timeline"]) == 10
    printed = capsys.readouterr().out
    assert "The profile does not hold these samples" in printed
    assert "replay" not in printed
    assert "Live and replay" not in (tmp_path / "live.html").read_text()
    stream = draw_stream(
        case.table, case.split.test, case.fitted, torch.ones(1), ElasticRequests(), config
    )
    assert set(stream.rows.tolist()) == {-1}
    assert sorted(map(int, stream.ids)) == list(range(2000, 2010))
    later = replace(config, skip=10)
    stream = draw_stream(
        case.table, case.split.test, case.fitted, torch.ones(1), ElasticRequests(), later
    )
    assert sorted(map(int, stream.ids)) == list(range(2010, 2020))


def test_samples_are_skipped_among_fresh_ones_only() -> None:
    with pytest.raises(InputError, match=r"stream\.skip=5: is for stream\.fresh=true"):
        replace(SHORT, skip=5)


class Failing(ElasticAdaptive):
    """A model whose process ends after some answers."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    def answer(self, stages: Any, configuration: Any) -> Any:
        if self.left == 0:
            raise ConnectionError("the server is gone")
        self.left -= 1
        return super().answer(stages, configuration)


@pytest.mark.parametrize(
    ("answers", "kept"), [(3, (0, 0)), (12 + 6 * 25, (20, 1)), (12 + 6 * 50 + 6 * 22, (40, 1))]
)
def test_what_was_served_before_a_server_died_is_kept(
    case: Case, tmp_path: Path, answers: int, kept: tuple[int, int]
) -> None:
    checkpoint = saved(tmp_path / "best.pt", case.controller, case.table, case.split)
    config = replace(SHORT, requests=40, repeats=2, json=str(tmp_path / "live.json"))
    # 26 cells are timed before: 20 to warm up, then 6
    with pytest.raises(
        InputError, match=r"serving request '\d+' by \w+: ConnectionError: the server is gone; "
    ) as error:
        live.run_live(checkpoint, case.table, Failing(answers + 26), ElasticRequests(), config)
    if not kept[0]:
        assert str(error.value).endswith("no request was served before that")
        assert not (tmp_path / "live.json").exists()
        return
    results = json.loads((tmp_path / "live.json").read_text())
    assert (results["requests"], results["repeats"]) == kept
    assert str(error.value).endswith(f"results are of the {kept[0]} requests × {kept[1]} before")


def test_what_cannot_be_served_is_refused(case: Case, tmp_path: Path) -> None:
    table, split, _, controller = case
    small = small_table(40)
    of_small = untrained(small, PolicyConfig(hidden=4))
    with pytest.raises(InputError, match="trained on profile 'builtin'"):
        run(saved(tmp_path / "a.pt", of_small, small, small.split()), table, SHORT)
    with pytest.raises(InputError, match="is not what model 'elastic' was measured on"):
        run(saved(tmp_path / "a.pt", of_small, small, small.split()), small, SHORT)
    network = Controller.for_table(
        table, split.train[:50], controller.controller.config, sense="mean"
    )
    with pytest.raises(InputError, match="mean over requests"):
        run(
            saved(tmp_path / "b.pt", DeployedController(network).eval(), table, split), table, SHORT
        )
    for wrong in ({"requests": 0}, {"fixed": 4}, {"warm_up": -1}, {"clock": "sun"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            LiveConfig(**wrong)  # type: ignore[arg-type]
