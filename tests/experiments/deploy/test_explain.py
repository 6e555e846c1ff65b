"""knobwise explain, by the command line: a decision, a run, the section of its report, mistakes."""

import json
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, UNTAUGHT, launch, read_json, refused, words_of, write_table
from helpers import arrays, small_table
from page_parts import charts_of, data_of
from replayed import untrained
from tensordict import TensorDict

import knobwise
from knobwise.agents import make_actor
from knobwise.agents.evaluation.limits import fit_bounds
from knobwise.agents.training.checkpoint import Loaded
from knobwise.common.words import quantity
from knobwise.envs.readers.long_table import read_long_table, write_long_table
from knobwise.experiments.evidence.results import write_results
from knobwise.losses import GRPOLoss
from knobwise.serving.tracker import LatencyTracker

SHORT = "optimiser.iterations=4 baselines=false policy=utility policy.fold_networks=2"
QUICK = words_of("train", TABLE, OPTIMISER, SHORT)
RUN, MEAN, HEAD = (f"runs/controller/{name}" for name in ("deadlines", "mean", "head"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a profile, the questions of some of its samples, and a run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    with chdir(folder):
        write_table()
        ids = read_long_table("t.parquet").sample_ids[::2]
        questions = pl.DataFrame({"sample_id": ids, "question": [f"What is {i}?" for i in ids]})
        questions.write_parquet("samples.parquet")
        launch(QUICK, "name=deadlines seeds=[0,1] budgets_ms=[8,25]")
        launch(QUICK, "name=mean seeds=[0] budget=mean budgets_ms=[10,14]")
        head = words_of("policy=independent policy.fold_networks=1 optimiser.patience=0")
        words = words_of("train", TABLE, UNTAUGHT, SHORT, head)
        launch(words, "name=head seeds=[0] budgets_ms=[8,12]")
    return folder


@pytest.fixture(autouse=True)
def _in_its_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


@pytest.fixture
def table():
    return read_long_table("t.parquet", features="f.npz")


def explained(capsys, *words):
    """What the verb prints, and what it writes as JSON."""
    capsys.readouterr()
    launch("explain", TABLE, *words, "json=why.json")
    return capsys.readouterr().out, read_json("why.json")


def test_a_decision_is_explained_beside_what_was_measured(table, capsys):
    policy, name = knobwise.load(RUN), table.sample_ids[4]
    text, why = explained(capsys, f"checkpoint={RUN} sample={name} budget_ms=12")
    between_ms = float(table.latency_ms.min()), float(table.latency_ms.max())
    wanted = policy.decide(table.blocks(4), 12, explain=True, between_ms=between_ms)
    assert (why["decision"], why["reason"]) == (wanted.decision, wanted.reason)
    assert [tuple(step) for step in why["by_budget"]] == wanted.by_budget
    assert len(why["expected"]) == table.num_configurations
    for row in why["expected"]:
        cell = 4, policy.configurations.index(row["configuration"])
        measured = {"accuracy": table.accuracy[cell], "latency_ms": table.latency_ms[cell]}
        assert row["measured"] == measured
    # what the budget alone, and other features, would lead to
    static = policy.agent.decider.static.single(12.0)
    assert why["static"] == policy.configurations[static]
    means = {name: block.mean(0) for name, block in table.features.items()}
    assert why["typical"] == policy.decide(means, 12)
    expected = {str(row["configuration"]): row for row in why["expected"]}
    for configuration in (why["decision"], why["static"]):
        assert f"utility {expected[str(configuration)]['utility']:.3f}" in text
    assert sum("max_crops=" in line for line in text.splitlines()[1:13]) in (10, 11, 12)
    for words in ("  chosen", "runner-up", "← this budget", f"(What is {name}?)"):
        assert sum(words in line for line in text.splitlines()) == 1


def test_a_run_without_baselines_is_evaluated_without_them_until_the_word_is_typed():
    policies = []
    for more in ("", "baselines=true"):
        launch("evaluate own_cost=false json=e.json", f"checkpoint={HEAD}", more)
        policies.append({row["policy"] for row in read_json("e.json")["rows"]})
    assert "random_forest" not in policies[0]
    assert policies[1] >= policies[0] | {"random_forest", "ridge", "knn"}


def test_a_run_is_evaluated_at_its_own_budgets_and_says_so(table, capsys):
    about = f"checkpoint={RUN} own_cost=false baselines=false json=e.json"
    capsys.readouterr()
    launch("evaluate", about)
    assert read_json("e.json")["budgets_ms"] == [8, 25]
    assert "budgets 8.00 ms, 25.0 ms" in capsys.readouterr().out
    # whoever names others gets them, and another profile has its own
    launch("evaluate", about, "budgets_ms=[12]")
    assert read_json("e.json")["budgets_ms"] == [12]
    half = pl.read_parquet("t.parquet").filter(pl.col("sample_id").cast(pl.Int64) % 2 == 0)
    half.write_parquet("half.parquet")
    new = "profile=table profile.path=half.parquet profile.features=f.npz split.seed=3"
    launch("evaluate", about, new)
    assert len(read_json("e.json")["budgets_ms"]) == 5


def test_what_a_run_deploys_becomes_an_actor(table):
    policy = knobwise.load(HEAD)
    limits = np.full(60, 10.0, np.float32)
    drawn = make_actor(policy)(TensorDict({"budget_ms": limits, **table.features}, [60]))
    chosen = policy.agent.choose(arrays(table), limits)
    assert table.find(drawn["action"]).tolist() == chosen.tolist()
    GRPOLoss(make_actor(knobwise.load(RUN), table, 4))  # what was taught can be trained further


def test_what_a_tracker_has_learned_changes_the_decision(table, capsys):
    policy = knobwise.load(RUN)
    tracker = LatencyTracker(policy.configurations, policy.agent.decider.digest)
    for _ in range(50):
        tracker.update(0, 1.0, 0.1, 6.0)
    Path("state.json").write_text(json.dumps(tracker.state()))
    words = words_of(f"checkpoint={RUN} sample={table.sample_ids[0]} budget_ms=25")
    _, why = explained(capsys, words, "tracker=state.json")
    _, plain = explained(capsys, words)
    assert why["without_drift"] == plain["decision"]
    assert plain["without_drift"] is None
    assert all(1.5 < row["slower"] < 3 for row in why["expected"])
    # other choices are those of the same slow machine
    decider, slow = policy.agent.decider, tracker.drift
    index, _, _ = decider.static_expected({}, 25.0, slow)
    assert why["static"] == policy.configurations[index] != plain["static"]
    means = {name: block.mean(0) for name, block in table.features.items()}
    assert why["typical"] == policy.decide(means, 25, drift=slow)
    Path("other.json").write_text(json.dumps(tracker.state() | {"controller": "another"}))
    assert "other.json" in refused(["explain", *TABLE, *words, "tracker=other.json"], capsys)


def test_under_limits_static_keeps_them_too_and_what_exceeds_them_is_said(capsys):
    table = small_table(60)
    price = (1 + table.configurations.sum(1)) * table.features["image_features"][:, :1].mul(2).exp()
    table = replace(table, costs={"usd": price})
    write_long_table(table, "priced.parquet")
    agent = untrained(table, deploy=[False] * 5)
    about = table, torch.arange(60), agent.controller.normaliser
    agent.calibration.costs = fit_bounds(*about, 0.5)
    agent.calibration.cost_names = ["usd"]
    agent.calibration.limits = {"values": {"usd": 5.0}, "probability": 0.5}
    Loaded(agent, "t", table.digest, {}).save("limits.pt")
    words = words_of("checkpoint=limits.pt budget_ms=30 profile.path=priced.parquet")
    # two that keep the limit, by different choices, and one that nothing keeps it for
    for row, wanted, exceeds in ((2, 8, False), (5, 4, False), (8, 0, True)):
        sample = f"sample={table.sample_ids[row]}"
        text, why = explained(capsys, *words, "profile.costs=[usd]", sample)
        assert why["static"] == why["decision"] == table.configuration(wanted)
        assert "all inputs alike" not in why["reason"]
        assert (table.costs["usd"][row, wanted] > 5) == exceeds
        measured = text.splitlines()[-1]
        assert ("above its limit of 5 USD" in measured) == exceeds
        assert ("on time" in measured) != exceeds


@pytest.mark.parametrize("run", [RUN, MEAN, HEAD])
def test_a_run_explains_its_decisions_on_the_terminal_and_in_its_report(run, capsys):
    text, why = explained(capsys, f"checkpoint={run}")
    results = read_json(f"{run}/results.json")
    assert why == results["explanation"] | {"knob_usage": results["knob_usage"]}
    assert text.count("At ") >= len(results["budgets_ms"])
    assert {row["name"] for row in why["importance"]} == {"image_features", "language_features"}
    page = Path(run, "report.html").read_text()
    section = page.partition("<summary>Why these configurations</summary>")[2]
    assert ("price of the latency" in section) == (run == MEAN)
    assert why["more_time"].keys() == {"cheaper", "worse", "static_cheaper", "static_worse"}
    share = f"{why['more_time']['cheaper']:.1%} of choices"
    assert share in text
    assert share in section
    assert ("(seed " in section.split("</p>")[0]) == (run == RUN)
    for group in why["difficulty"]["groups"]:
        assert f"<td>{quantity(group['difficulty_ms'])}</td>" in section
    # easy → cheap, hard → costly: a dot for each sample, and the means of groups
    specs = [spec for spec in charts_of(page) if "difficulty_ms" in json.dumps(spec)]
    drawn = [rows for rows in data_of(*specs) if "difficulty_ms" in rows[0]]
    samples = [[row["difficulty_ms"], row["policy_ms"]] for row in drawn[0]] if drawn else []
    assert samples == why["difficulty"]["points"]
    groups = {row["difficulty_ms"] for rows in drawn[1:] for row in rows}
    assert groups == {group["difficulty_ms"] for group in why["difficulty"]["groups"]}
    questions = {row["question"] for row in why["best"] + why["worst"]}
    assert all(question is None or question in section for question in questions)


def test_a_decision_for_a_mean_budget_and_one_without_predictions_say_what_there_is(table, capsys):
    sample = f"sample={table.sample_ids[1]}"
    text, why = explained(capsys, f"checkpoint={MEAN} budget_ms=14", sample)
    expected = {"configuration", "probability", "accuracy", "latency_ms", "utility", "measured"}
    assert set(why["expected"][0]) == expected
    assert {round(budget, 4) for budget, _ in why["by_budget"]} <= {10.0, 14.0}
    assert "on time" not in text.splitlines()[0]
    # what is above a mean may be made up for by others
    slowest = table.sample_ids[int(table.latency_ms.max(1).values.argmax())]
    text, _ = explained(capsys, f"checkpoint={MEAN} budget_ms=14", f"sample={slowest}")
    assert "late." in text.splitlines()[-1]
    assert "ms late" not in text
    _, why = explained(capsys, f"checkpoint={HEAD} budget_ms=9", sample)
    assert set(why["expected"][0]) == {"configuration", "probability", "measured"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sample=nobody budget_ms=9", "sample=nobody"),
        ("sample=0", "budget_ms=None"),
        *((f"sample=0 budget_ms={b}", f"budget_ms={b}") for b in ("-1.0", "0.0", "nan", "inf")),
        ("budget_ms=9", "sample=ID"),
        ("sample=0 budget_ms=9 tracker=nothing.json", "tracker=nothing.json"),
        ("sample=0 budget_ms=9 tracker=t.parquet", "tracker=t.parquet"),
        ("sample=0 budget_ms=9 profile=builtin", "12 configurations"),
        (f"checkpoint={MEAN} sample=0 budget_ms=9", "10, 14 ms only"),
        ("checkpoint=nowhere", "nowhere/results.json"),
        ("checkpoint=nowhere sample=0 budget_ms=9", "nowhere"),
        ("checkpoint=old", "no explanation"),
    ],
)
def test_a_mistake_is_one_line(words, message, table, capsys):
    Path("old").mkdir(exist_ok=True)
    results = read_json(f"{RUN}/results.json")
    del results["explanation"]
    write_results(Path("old"), results)
    given = words.replace("sample=0", f"sample={table.sample_ids[0]}").split()
    profile = [] if "profile=builtin" in given else TABLE
    assert message in refused(["explain", f"checkpoint={RUN}", *profile, *given], capsys)


def test_a_sample_of_several_data_sets_is_named_with_its_data_set(table, capsys):
    frame = pl.read_parquet("t.parquet")
    frame.join(pl.DataFrame({"dataset": ["a", "b"]}), how="cross").write_parquet("two.parquet")
    twice = {name: np.concatenate([block, block]) for name, block in np.load("f.npz").items()}
    np.savez("two.npz", dataset=np.repeat(["a", "b"], 60), **twice)
    first = table.sample_ids[0]
    words = words_of(f"explain checkpoint={RUN} budget_ms=9 profile=table")
    words += words_of("profile.path=two.parquet profile.features=two.npz")
    assert f"a/{first}, b/{first}" in refused([*words, f"sample={first}"], capsys)
    launch(words, f"sample=b/{first}")
