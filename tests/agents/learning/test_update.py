"""What a controller learns from the log of its requests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import arrays
from replayed import logging_model, serve_requests, small_stack

from knobwise.agents.learning.settings import UpdateConfig
from knobwise.agents.learning.update import Update, update
from knobwise.agents.serving.request_log import Logged, logged_of, read_log
from knobwise.agents.serving.versions import add_version, serve, try_out
from knobwise.agents.stack.deployed import DeployedController
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ProfileTable


def slow_crops(values: Mapping[str, int]) -> float:
    """A drift that no level or single number describes: two of three crops are slower."""
    return 1.0 if values["max_crops"] == 2 else 1.8


def logged_requests(
    folder: Path, count: int = 700, drifts: bool = True, label: bool = True, tracker: bool = False
) -> tuple[DeployedController, ProfileTable, Logged]:
    agent, table = small_stack(300)
    slower = slow_crops if drifts else (lambda values: 1.0)
    model = logging_model(
        folder, agent, table, slower, explore=0.3, explore_loss=0.3, seed=0, tracker=tracker
    )
    serve_requests(model, table, count, label)
    return agent, table, logged_of(read_log(folder).rows, 12, agent.controller.normaliser.sizes)


def test_latencies_that_drifted_are_learned_and_the_new_controller_takes_over(
    tmp_path: Path,
) -> None:
    agent, table, logged = logged_requests(tmp_path, 2800)
    result = update(agent, logged)
    true = np.array([slow_crops(table.configuration(c)) for c in range(12)])
    used = np.bincount(logged.choice, minlength=12) > 30
    assert np.log(result.factors)[used] == pytest.approx(np.log(true)[used], abs=0.25)
    assert list(result.steps) == ["latencies", "accuracies"]
    assert result.better
    assert result.steps["latencies"].better
    there = replace(table, latency_ms=table.latency_ms * torch.from_numpy(true).float())
    values = []
    for each in (agent, result.agent):
        chosen = [each.choose(arrays(there), np.full(300, b)) for b in (8.0, 12.0, 18.0)]
        rows = torch.arange(300)
        pairs = zip(chosen, (8, 12, 18), strict=True)
        worth = [there.accuracy[rows, c] * (there.latency_ms[rows, c] <= b) for c, b in pairs]
        values.append(torch.stack(worth).mean().item())
    assert values[1] > values[0] + 0.03
    assert result.agent.decider.digest != agent.decider.digest


def test_accuracies_that_fell_are_learned(tmp_path: Path) -> None:
    agent, _, logged = logged_requests(tmp_path, drifts=False)
    lost = logged.choice >= 8
    logged = logged._replace(accuracy=np.where(lost, 0.0, logged.accuracy))
    result = update(agent, logged)
    used = np.bincount(logged.choice, minlength=12) > 20
    assert used[8:].any()
    assert (np.array(result.logits)[8:][used[8:]] < -1).all()
    assert (np.array(result.logits)[:8][used[:8]] > -1).all()


def worse_from(choice: int, rows: Logged) -> Logged:
    """The same requests where configurations from this one on give wrong answers only."""
    return rows._replace(accuracy=np.where(rows.choice >= choice, 0.0, rows.accuracy))


def test_a_trial_shows_soon_what_little_exploration_cannot(tmp_path: Path) -> None:
    agent, table = small_stack(300)
    options = {"explore": 0.05, "explore_loss": 0.3, "seed": 0, "tracker": False, "clock": "cpu"}
    model = logging_model(tmp_path / "log", agent, table, **options)

    sizes = agent.controller.normaliser.sizes

    def learned() -> Update:
        rows = read_log(tmp_path / "log").rows
        logged = logged_of(rows, 12, sizes, model.controller.digest)
        return update(agent, worse_from(8, logged))

    results = serve_requests(model, table, 250)
    assert sum(result.choice >= 8 for result in results) > 40
    first = learned()
    assert not first.better
    assert first.promising
    assert "trial" not in first.steps
    out = tmp_path / "out"
    serve(out, add_version(out, lambda to: agent.export(to / "controller.npz") and None))
    try_out(
        out, add_version(out, lambda to: first.candidate.export(to / "controller.npz") and None)
    )
    model.watch(out / "current", trial=0.5)
    serve_requests(model, table, 1000, seed=1)
    second = learned()
    trial = second.steps["trial"]
    assert (trial.requests, trial.unsupported) == (1000, 0)
    assert trial.better
    assert second.better
    # what the trial estimates is what the two choices would have got, up to its interval
    logged = logged_of(read_log(tmp_path / "log").rows, 12, sizes, model.controller.digest)
    on_trial = logged.take(logged.tried >= 0)
    rows = torch.tensor(
        [
            int(np.flatnonzero((table.features["image_features"].numpy() == x).all(1))[0])
            for x in on_trial.features["image_features"]
        ]
    )
    utility = (table.accuracy * (torch.arange(12) < 8))[rows] * (
        table.latency_ms[rows] <= torch.from_numpy(on_trial.limit_ms).unsqueeze(1)
    )
    each = torch.arange(len(rows))
    true = float((utility[each, on_trial.tried] - utility[each, on_trial.best]).mean())
    estimate = trial.doubly_robust["difference"]
    assert estimate.low <= true <= estimate.high
    assert true > 0.01


def test_a_trial_that_gains_nothing_ends(tmp_path: Path) -> None:
    agent, _, logged = logged_requests(tmp_path, 300, drifts=False)
    generator = np.random.default_rng(0)
    lost = worse_from(8, logged)
    halves = UpdateConfig(folds=2)
    assert update(agent, lost, halves).promising
    # a candidate that chose what gave wrong answers, in half of the requests
    best, tried = np.full(300, 8), np.full(300, 11)
    choice = np.where(generator.random(300) < 0.5, best, tried)
    propensity = np.zeros((300, 12))
    propensity[:, [8, 11]] = 0.5
    failed = worse_from(
        9, logged._replace(choice=choice, best=best, tried=tried, propensity=propensity)
    )
    result = update(agent, failed, halves)
    assert result.steps["trial"].doubly_robust["difference"].value < 0
    assert not result.promising


def test_a_stream_without_drift_changes_next_to_nothing(tmp_path: Path) -> None:
    agent, table, logged = logged_requests(tmp_path, drifts=False, tracker=True)
    result = update(agent, logged)
    assert abs(np.log(result.factors)).max() < 0.3
    rows = torch.arange(300)

    def worth(controller: DeployedController) -> float:
        chosen = controller.choose(arrays(table), np.full(300, 12.0))
        return float(
            (table.accuracy[rows, chosen] * (table.latency_ms[rows, chosen] <= 12.0)).mean()
        )

    assert worth(result.agent) > worth(agent) - 0.005


def test_without_labels_only_latencies_are_learned_and_nothing_takes_over(tmp_path: Path) -> None:
    agent, _, logged = logged_requests(tmp_path, count=120, label=False)
    result = update(agent, logged)
    assert list(result.steps) == ["latencies"]
    assert not result.better
    assert result.agent is agent
    assert result.steps["latencies"].requests == 0
    assert result.steps["latencies"].plain()["bound"] is None


def test_the_old_controller_is_never_changed(tmp_path: Path) -> None:
    agent, _, logged = logged_requests(tmp_path, count=200)
    before = agent.decider.digest
    update(agent, logged, UpdateConfig(folds=2))
    assert DeployedController.restored(agent.plain()).decider.digest == before


def test_controllers_that_cannot_learn_and_too_few_requests_are_refused(tmp_path: Path) -> None:
    agent, _, logged = logged_requests(tmp_path, count=6)
    with pytest.raises(InputError, match="6 requests are too few"):
        update(agent, logged, UpdateConfig(folds=2))
    alone = DeployedController(agent.controller, None, agent.settled)
    with pytest.raises(InputError, match="needs a controller for deadlines with a teacher"):
        update(alone, logged)
    for wrong in ({"confidence": 1.0}, {"folds": 1}, {"clip": 0.5}):
        with pytest.raises(InputError, match=r"learning\."):
            UpdateConfig(**wrong)  # type: ignore[arg-type]
