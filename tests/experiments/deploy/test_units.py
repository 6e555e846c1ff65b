"""Every way to give a limit, with every unit: a time is kept in ms whatever the unit of its file,
and what measures time refuses a cost that is none."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, launch, read_json, refused, words_of
from helpers import arrays, input_error, small_table
from replayed import ReplayedModel, untrained

import knobwise
from knobwise.agents import NumpyController
from knobwise.agents.deployed.arrays import digest_of
from knobwise.agents.evaluation.own_cost import expected_cost_ms, own_costs
from knobwise.agents.learning.adaptation import log_ratios
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.envs import ConfigBanditEnv, ProfileTable, default_budgets
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import long_frame
from knobwise.envs.tables.cost_words import in_words
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.serving import AdaptiveModel
from knobwise.serving.tracker import LatencyTracker

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "Seconds": 1.0, "min": 60.0}
TIMES = [*SECONDS, "h"]
SECONDS["h"] = 3600.0
OTHERS = ["USD", "tokens", "J"]
SAMPLES = 40


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wide_frame(table, unit):
    """The measurements of a table in ms, with their times in this unit as `cost`."""
    frame = long_frame(table).with_columns(pl.col("latency_ms").cast(pl.Float64))
    factor = 1e3 * SECONDS.get(unit, 1e-3)
    return frame.select(pl.exclude("latency_ms"), cost=pl.col("latency_ms") / factor)


def written(unit, features_ms=0.0):
    """A table in ms, and the same as it is read from a file in this unit."""
    table = small_table(SAMPLES)
    wide_frame(table, unit).write_csv("t.csv")
    write_features(table, "f.npz")
    read = knobwise.read("t.csv", "f.npz", latency="cost", unit=unit, features_ms=features_ms)
    return table, read


def case(unit):
    """A table in this unit, a policy for it, and the words that name both."""
    _, table = written(unit)
    agent = untrained(table, None, [0.9] * 5)
    rows = dict(zip(("train_rows", "validation_rows", "test_rows"), table.split(), strict=True))
    rows |= {"seen": table.fingerprints(rows["train_rows"]), "iteration": 0, "grpo_held_out": {}}
    save_checkpoint("best.pt", agent, table, rows)
    profile = "profile=table profile.path=t.csv profile.features=f.npz profile.latency=cost"
    return table, agent, words_of(profile, [f"profile.unit={unit}", "checkpoint=best.pt"])


@pytest.mark.parametrize("unit", TIMES)
def test_times_are_kept_in_ms(unit):
    table, read = written(unit, features_ms=0.25)
    assert (read.unit, read.features_ms) == ("ms", 0.25)
    torch.testing.assert_close(read.latency_ms, table.latency_ms, rtol=2e-7, atol=0)
    budgets = default_budgets(read)
    torch.testing.assert_close(budgets, default_budgets(table), rtol=2e-7, atol=0)
    # the costs of a decision and of features are added to times in ms
    ((took, charged_ms),) = own_costs([untrained(read).decider], read, torch.arange(5), budgets)
    torch.testing.assert_close(charged_ms, took / 1e3 + 0.25)
    assert expected_cost_ms(read) == pytest.approx(0.28)
    # it is written and read in ms
    read.save("t.safetensors")
    assert ProfileTable.load("t.safetensors").digest == read.digest
    assert knobwise.read("t.safetensors").unit == "ms"
    profiled_ms = log_ratios(table, read)[1]
    torch.testing.assert_close(
        profiled_ms, torch.zeros(len(profiled_ms)).double(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("unit", OTHERS)
def test_another_cost_keeps_its_unit(unit):
    table, read = written(unit, features_ms=0.25)
    assert read.unit == unit
    assert torch.equal(read.latency_ms, table.latency_ms)
    # nothing that takes time is charged
    ((took, charged),) = own_costs([untrained(read).decider], read, torch.arange(5), torch.ones(5))
    assert (took > 0).all()
    assert charged.tolist() == [0.0] * 5
    assert expected_cost_ms(read) == 0
    # cells of another unit are not compared
    with input_error(unit):
        log_ratios(table, read)


@pytest.mark.parametrize("unit", ["ms", "s", "us", "USD", "tokens"])
def test_every_decision_is_in_the_unit_that_is_kept(unit, capsys):
    table, agent, words = case(unit)
    kept = table.unit
    policy = knobwise.load("best.pt")
    limits = np.resize(default_budgets(table).numpy(), SAMPLES)
    wanted = [table.configuration(c) for c in agent.choose(arrays(table), limits)]
    assert policy.unit == kept
    assert policy.decide(arrays(table), limits) == wanted
    assert policy.decide(arrays(table, 3), float(limits[3])) == wanted[3]
    # as it is exported
    launch("export", words, "out=out")
    exported = NumpyController.load("out/controller.npz")
    assert exported.unit == kept
    assert exported.decide(arrays(table, 3), float(limits[3])) == wanted[3]
    with pytest.raises(ValueError, match=kept):
        exported.decide(arrays(table, 3), -1.0)
    # for a file
    columns = {"budget_ms": limits.astype(np.float64)}
    for name, block in arrays(table).items():
        columns |= {f"{name}[{i}]": values for i, values in enumerate(block.T)}
    pl.DataFrame(columns).write_csv("r.csv")
    for checkpoint in ("best.pt", "out/controller.npz"):
        launch("decide requests=r.csv", [f"checkpoint={checkpoint}"])
        assert pl.read_csv("decisions.csv").select(*table.configuration(0)).to_dicts() == wanted
    assert kept in refused(
        words_of("decide requests=r.csv checkpoint=best.pt budget_ms=-1"), capsys
    )
    # explained, and judged
    capsys.readouterr()
    launch("explain", words, f"sample=3 budget_ms={limits[3]} json=why.json")
    assert read_json("why.json")["decision"] == wanted[3]
    printed = capsys.readouterr().out
    assert (" ms" in printed) == (kept == "ms")
    assert f" {kept}" in printed
    launch("evaluate", words, "json=e.json baselines=false split.train=0.5")
    results = read_json("e.json")
    assert results["unit"] == kept
    env = ConfigBanditEnv(table, render_mode="ansi")
    _, info = env.reset(seed=0)
    assert f"{info['budget_ms']:.2f} {kept}" in env.render()


@pytest.mark.parametrize("unit", ["ms", "s", "us"])
def test_what_measures_time_takes_limits_in_ms(unit):
    table, _, _ = case(unit)
    policy = knobwise.load("best.pt")
    serve = knobwise.wrap(
        lambda row, **knobs: knobs, policy, features=lambda row: arrays(table, row)
    )
    median_ms = float(default_budgets(table)[2])
    result = serve.result(3, budget_ms=median_ms)
    # what is left after the features
    assert 0 < result.limit_ms <= median_ms
    assert result.answer == policy.decide(arrays(table, 3), result.limit_ms)
    # the model answers in the time of the profile, so that nothing is learned from its times
    model = AdaptiveModel(ReplayedModel(table), policy)
    for row in range(SAMPLES):
        model.answer(Request(row, ""), median_ms)
    assert 0.5 < model.tracker.factors()["level"] < 2


@pytest.mark.parametrize("unit", OTHERS)
def test_what_measures_time_refuses_other_costs(unit, capsys):
    table, agent, words = case(unit)
    policy = knobwise.load("best.pt")
    call = {"features": lambda row: arrays(table, row)}
    for controller in (policy, agent, agent.decider):
        with input_error(unit):
            knobwise.wrap(lambda row, **knobs: knobs, controller, **call)
        with input_error(unit):
            AdaptiveModel(ReplayedModel(table), controller)
    in_ms = untrained(small_table(SAMPLES))
    with input_error(unit):
        AdaptiveModel(ReplayedModel(table), in_ms).calibrate(table, {0: Request(0, "")})
    state = LatencyTracker(policy.configurations, agent.decider.digest).state()
    Path("tracker.json").write_text(json.dumps(state))
    for line in (
        words_of("evaluate live=true", words),
        words_of("explain sample=3 budget_ms=9 tracker=tracker.json", words),
    ):
        assert unit in refused(line, capsys)


def test_a_profile_in_another_unit_is_refused(capsys):
    _, _, words = case("s")
    words[words.index("profile.unit=s")] = "profile.unit=USD"
    for verb in ("evaluate", "export out=out", "explain sample=3 budget_ms=9"):
        assert "USD" in refused(words_of(verb, words), capsys)
    table = small_table(SAMPLES)
    for unit in ("s", "", None, 3):
        with input_error("unit"):
            dataclasses.replace(table, unit=unit)
    with input_error("unit"):
        knobwise.read("t.csv", latency="cost", unit="")
    table.save("t.safetensors")
    with input_error("profile.unit"):
        knobwise.read("t.safetensors", unit="s")


def test_files_that_do_not_say_their_unit_are_refused(capsys):
    _, agent, _ = case("ms")
    content = torch.load("best.pt", weights_only=True)
    del content["controller"]["controller"]["unit"]
    torch.save(content, "old.pt")
    with input_error("old.pt.*unit"):
        load_checkpoint("old.pt")
    columns = agent.arrays()
    header = json.loads(bytes(columns["header"])) | {"format": "knobwise.NumpyController/3"}
    del header["unit"], columns["digest"]
    columns["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    columns["digest"] = np.frombuffer(digest_of(columns), np.uint8)
    np.savez("old.npz", **columns)
    with pytest.raises(ValueError, match=r"version.*export it again"):
        NumpyController.load("old.npz")
    line = refused(words_of("decide requests=r.csv checkpoint=old.npz budget_ms=3"), capsys)
    assert "old.npz" in line


@pytest.mark.parametrize("unit", ["s", "USD"])
def test_a_run_and_its_page(unit, capsys):
    _, _, words = case(unit)
    training = words_of("policy=utility policy.fold_networks=2 seeds=[0] baselines=false name=run")
    launch("train", [word for word in words if "best.pt" not in word], OPTIMISER, training)
    printed = capsys.readouterr()
    results = read_json("runs/latest/results.json")
    kept = "ms" if unit == "s" else unit
    assert results["unit"] == kept
    _, table = written(unit)
    whole = default_budgets(table)
    assert (
        whole.min() / 2 < min(results["budgets_ms"]) < max(results["budgets_ms"]) < 2 * whole.max()
    )
    # a price is not charged for decisions, and that is said
    assert bool(re.search("USD.*profile.features_ms", printed.err)) == (unit == "USD")
    launch("inspect", [word for word in words if "best.pt" not in word], "html=i.html")
    inspected = capsys.readouterr().out
    pages = [Path("runs/latest/report.html").read_text(), Path("i.html").read_text()]
    # without data and scripts
    texts = [re.sub(r"(?s)<(script|style|pre).*?</\1>", "", page) for page in pages]
    titles = re.findall(r'"title":"([^"]*)"', "".join(pages))
    spoken = "\n".join([printed.out, inspected, *texts, *titles])
    of_times = re.findall(r"(?i)(?<![\w.=])(?:latency|latencies|on time|late|slower)\b", spoken)
    assert bool(of_times) == (unit == "s"), of_times
    assert f"({kept})" in "".join(titles)
    assert bool(re.search(r"\d ms\b", spoken)) == (unit == "s")


def test_words_about_times_become_words_about_costs():
    spoken = {
        "mean latency": "mean cost",
        "Latency budget (J)": "Budget (J)",
        "0 for a late one": "0 for one above the limit",
        "On time: 3 % are late": "Within the limit: 3 % are above the limit",
        "would take 1.50 times as long": "would cost 1.50 times as much",
        # names of the profile stay
        "12 answers took 3.2 times as long": "12 answers cost 3.2 times as much",
        "3.1 × as long as expected": "3.1 × as much as expected",
        "latency_ms, mode=late, latency=3, 'latency'": "latency_ms, mode=late, latency=3, 'latency'",
    }
    for text, wanted in spoken.items():
        assert in_words(text, "J") == wanted
        for unit in ("ms", "s"):
            assert in_words(text, unit) == text
