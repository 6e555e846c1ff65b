"""`knobwise update`, through the command line: from a log, and for the hardware that some cells
were timed on."""

import json
import math
import re
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import OPTIMISER, TABLE, launch, mistake, read_json, refused, words_of, write_table
from helpers import arrays, deployed, driven_apart, small_table
from page_parts import said
from replayed import logging_model, serve_requests, untrained
from rich.console import Console

from knobwise.__main__ import main
from knobwise.agents import DeployedController, NumpyController, evaluate_policy
from knobwise.agents.learning import adaptation
from knobwise.agents.training.checkpoint import load_checkpoint, save_checkpoint
from knobwise.envs import default_budgets
from knobwise.envs.readers.long_table import read_long_table
from knobwise.experiments.report.inspection import log_sentences, print_log
from knobwise.serving.versions import add_version, serve_version, serving_version

BEST = "runs/latest/checkpoints/best.pt"
TRAINED_ON = words_of("trained_on=table trained_on.path=t.parquet trained_on.features=f.npz")
FACTORS = {4: 2.0, 8: 6.0}
"""By top_k: how many times as long the other hardware takes."""
EXPLORING = {"explore": 0.4, "explore_loss": 0.4, "seed": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a profile and a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    with chdir(folder):
        write_table(120)
        words = words_of(
            "policy=utility policy.fold_networks=2 seeds=[0] name='run[1]' baselines=false"
        )
        words += ["optimiser.teacher_iterations=60", "optimiser.pretrain_iterations=150"]
        launch("train", TABLE, OPTIMISER, words)
    return folder


def decides_alike(version, table):
    """Whether a version's checkpoint and its arrays are the same policy."""
    controller = load_checkpoint(version / "controller.pt").controller
    exported = NumpyController.load(version / "controller.npz")
    limits = np.resize(default_budgets(table).double().numpy(), table.num_samples)
    both = [each.choose(arrays(table), limits) for each in (controller, exported)]
    return controller.decider.digest == exported.digest and np.array_equal(*both)


@pytest.fixture(autouse=True)
def _in_its_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


@pytest.fixture
def table():
    return read_long_table("t.parquet", features="f.npz")


@pytest.fixture
def agent():
    return load_checkpoint(BEST).controller


@pytest.fixture
def words(tmp_path):
    """An update from the log in `tmp_path`."""
    return words_of(f"update log={tmp_path}/log out={tmp_path}/out")


def facts_in(version):
    return read_json(version / "update.json")


def digest_in(version):
    return NumpyController.load(version / "controller.npz").digest


def timed(cells):
    """These cells with the times of the other hardware."""
    factor = pl.col("top_k").replace_strict(FACTORS, return_dtype=pl.Float64)
    return cells.with_columns(latency_ms=pl.col("latency_ms") * factor)


def test_some_timed_cells_give_a_controller_for_other_hardware(table, capsys):
    loaded = load_checkpoint(BEST)
    timed(pl.read_parquet("t.parquet").sample(16, seed=0)).write_csv("timed.csv")
    launch("update", TRAINED_ON, "profile=table profile.path=timed.csv out=adapted")
    adapted = load_checkpoint("adapted/current/controller.pt")
    facts = adapted.extra["adapted"]
    factors = torch.tensor([FACTORS[table.configuration(c)["top_k"]] for c in range(12)])
    assert facts["factors"] == pytest.approx(factors.tolist(), rel=0.06)
    assert (facts["timed"], facts["cells"]) == ("timed", 16)
    assert decides_alike(Path("adapted/current"), table)
    there = replace(table, latency_ms=table.latency_ms * factors)
    request = there, loaded.extra["test_rows"], default_budgets(there)
    before, after = (
        evaluate_policy(each.controller, *request).utility.mean() for each in (loaded, adapted)
    )
    assert after > before + 0.1
    # it is not one to adapt again
    words = words_of("update", TRAINED_ON, "profile=builtin checkpoint=adapted/current")
    assert "already adapted" in mistake(words, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cells: cells.with_columns(top_k=5), "configuration"),
        (lambda cells: cells.with_columns(sample_id=pl.format("s{}", "sample_id")), "cells"),
        (lambda cells: cells.rename({"top_k": "experts"}), "top_k"),
        (lambda cells: cells.with_columns(latency_ms=None), "latency_ms"),
    ],
)
def test_cells_that_cannot_be_used_are_refused_in_a_line(change, message, capsys):
    change(pl.read_parquet("t.parquet")).write_csv("wrong.csv")
    words = words_of("update", TRAINED_ON, "profile=table profile.path=wrong.csv out=nothing")
    assert message in refused(words, capsys)


def test_times_under_several_settings_are_not_averaged(capsys):
    """Cells that were timed at batch 1, as in training, and at batch 8, 8 times as slow."""
    cells = pl.read_parquet("t.parquet").sample(20, seed=1)
    both = [cells.with_columns(pl.col("latency_ms") * b, batch=pl.lit(b)) for b in (1, 8)]
    pl.concat(both).write_csv("batches.csv")
    words = words_of("update", TRAINED_ON, "profile=table profile.path=batches.csv out=nothing")
    line = mistake(words, capsys)
    assert "batches.csv: batch: " in line
    assert "1, 8" in line
    # 20 other cells at each: no cell was timed twice
    pl.concat([both[0].head(10), both[1].tail(10)]).write_csv("batches.csv")
    launch(words[:-1], "out=batches")
    # without the column nobody can tell
    pl.concat(both).drop("batch").write_csv("batches.csv")
    launch(words[:-1], "out=unknown")
    assert facts_in(Path("unknown/current"))["cells"] == 20


@pytest.mark.parametrize("column", [None, "repeat", "run", "seed", "index"])
def test_times_that_were_measured_again_are_averaged(column):
    """The median of 1, 2 and 9 times as long is twice as long."""
    cells = pl.read_parquet("t.parquet").sample(20, seed=1)
    again = []
    for number, factor in enumerate((1, 2, 9)):
        numbered = {column: pl.lit(number)} if column else {}
        again.append(cells.with_columns(pl.col("latency_ms") * factor, **numbered))
    # each run also measured something that the reader does not know
    pl.concat(again).with_columns(watts=pl.int_range(pl.len())).write_csv("again.csv")
    launch("update", TRAINED_ON, f"profile=table profile.path=again.csv out=again-{column}")
    facts = facts_in(Path(f"again-{column}/current"))
    assert facts["cells"] == 20
    assert facts["factors"] == pytest.approx([2.0] * 12, rel=0.01)


def test_cells_that_the_profile_does_not_hold_are_counted(capsys):
    """top_k in another unit in all rows but 6, an id that nothing has in 4 others."""
    cells = pl.read_parquet("t.parquet").sample(20, seed=1).with_row_index("number")
    number = pl.col("number")
    spelled = cells.with_columns(
        top_k=pl.when(number < 10).then("top_k").otherwise(pl.col("top_k") * 100),
        sample_id=pl.when(number.is_between(6, 9)).then(pl.lit("x7")).otherwise("sample_id"),
    )
    for rows, why in ((20, " has no configuration .*top_k=[48]00"), (10, " has no sample 'x7'")):
        spelled.head(rows).drop("number").write_csv("units.csv")
        launch("update", TRAINED_ON, f"profile=table profile.path=units.csv out=units-{rows}")
        printed = capsys.readouterr().out
        assert re.search(rf"^6 of {rows} timed cells .*{why}", printed, re.MULTILINE)
        facts = facts_in(Path(f"units-{rows}/current"))
        assert (facts["cells"], facts["cells_in_file"]) == (6, rows)
    # of whole files nothing is said
    spelled.head(6).drop("number").write_csv("units.csv")
    launch("update", TRAINED_ON, "profile=table profile.path=units.csv out=units-6")
    assert " of 6 timed cells" not in capsys.readouterr().out


def test_controllers_without_expectations_to_move_are_refused(capsys):
    table = small_table(40)
    mean = deployed(table, budgets_ms=torch.tensor([9.0, 15.0]), constraint="mean")
    words = words_of("update profile=builtin checkpoint=other.pt out=nothing")
    for controller, message in ((untrained(table), "no teacher"), (mean, "mean budgets")):
        save_checkpoint("other.pt", controller, table, {})
        assert message in refused(words, capsys)


def test_all_cells_are_read_by_the_knobs_of_the_controller():
    """Other columns may look like knobs."""
    every = timed(pl.read_parquet("t.parquet")).with_columns(watts=pl.int_range(pl.len()))
    every.write_csv("all.csv")
    launch("update", TRAINED_ON, "profile=table profile.path=all.csv out=every")
    facts = load_checkpoint("every/current/controller.pt").extra["adapted"]
    assert facts["cells"] == 120 * 12
    assert np.log(facts["factors"]).mean() == pytest.approx(math.log(12) / 2, abs=0.01)


def test_a_log_gives_versions_of_which_the_better_serves_and_rollback_goes_back(
    table, agent, words, tmp_path, capsys
):
    current = tmp_path / "out/current"
    back = words_of("update rollback=true", words[2])

    def slower(values):
        return 1.0 if values["top_k"] == 4 else 3.0

    model = logging_model(tmp_path / "log", agent, table, slower, **EXPLORING, tracker=False)
    serve_requests(model, table, 700)
    model.log.label("nobody", 1.0)
    launch("inspect json=facts.json", words[1])
    facts = read_json("facts.json")
    assert facts["set_aside"] == {"a label of an unknown request": 1}
    # the mean of scores between 0 and 1 is no share that is right
    assert facts["fractional"] == bool(((table.accuracy > 0) & (table.accuracy < 1)).any())
    for fractional, wanted in ((False, "right"), (True, "mean_accuracy")):
        lines = log_sentences(facts | {"fractional": fractional})
        assert said(lines)["shares"]["accuracy"].name == wanted
        capsys.readouterr()
        print_log(facts | {"fractional": fractional}, Console())
        assert capsys.readouterr().out.splitlines() == list(map(str, lines))

    launch(words)
    facts = facts_in(current)
    assert (facts["before"], facts["better"], facts["requests"]) == ("0000", True, 700)
    assert decides_alike(current, table)
    model.watch(current)
    assert model.controller.digest == digest_in(current)
    serve_requests(model, table, 60, seed=1)

    # the log now holds requests of both versions; the old checkpoint is not what serves any more
    assert "out=" in mistake(words, capsys)
    launch(words, f"checkpoint={current}")
    # it may serve or not
    assert facts_in(tmp_path / "out/versions/0002")["requests"] == 760
    while (before := facts_in(current)["before"]) is not None:
        launch(back)
        assert current.resolve().name == before
    assert current.resolve().name == "0000"
    assert "no version before" in mistake(back, capsys)
    # a log of another controller is refused, with the reason
    network = driven_apart(table, agent.controller.config)
    other = DeployedController(network, agent.teacher, agent.calibration).eval()
    save_checkpoint("else.pt", other, table, {})
    assert main([*words[:2], "out=else", "checkpoint=else.pt"]) == 2
    assert re.search("^760 .*: of another controller$", capsys.readouterr().out, re.MULTILINE)


def test_what_labels_say_of_each_configuration_is_printed(table, agent, words, tmp_path, capsys):
    model = logging_model(tmp_path / "log", agent, table, **EXPLORING, tracker=False)
    labels = {}
    for number, result in enumerate(serve_requests(model, table, 400)):
        accuracy = float(number % 3 == 0)
        model.log.label(result.request_id, accuracy)
        labels.setdefault(result.choice, []).append(accuracy)
    launch(words)
    printed = capsys.readouterr().out
    many = {c: values for c, values in labels.items() if len(values) >= 10}
    assert many
    for c, values in many.items():
        wanted = (
            rf"{len(values)} .*{re.escape(str(table.configuration(c)))}.* {np.mean(values):.2f}"
        )
        assert re.search(wanted, printed)


def test_a_poisoned_log_is_explained_and_serves_only_if_it_is_accepted(
    table, agent, words, tmp_path, capsys
):
    model = logging_model(tmp_path / "log", agent, table, **EXPLORING, tracker=False)
    for result in serve_requests(model, table, 1200):
        if result.choice == 0:
            model.log.label(result.request_id, 1.0)
    # some rows deny their own times; nothing is learned from them
    (path,) = (tmp_path / "log").glob("requests-*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:40]:
        row["met"] = not row["met"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(words)
    printed = " ".join(capsys.readouterr().out.split())
    assert str(table.configuration(0)) in printed
    assert "accept=true" in printed
    current = tmp_path / "out/current"
    assert current.resolve().name == "0000"
    waiting = facts_in(tmp_path / "out/versions/0001")
    assert waiting["requests"] == 1160
    # all of them had labels, and some had two
    labels = 40 + sum(row["choice"] == 0 for row in rows[:40])
    assert labels > 40
    assert sorted(waiting["set_aside"].values()) == [40, labels]
    assert "40 skipped" in printed
    assert (waiting["better"], waiting["accepted"]) == (False, False)
    launch(words, "accept=true")
    assert current.resolve().name == "0002"
    facts = facts_in(current)
    assert (facts["better"], facts["accepted"], facts["doubts"]) == (True, True, waiting["doubts"])
    assert facts["doubts"]["accuracies"][0] in " ".join(capsys.readouterr().out.split())


def test_rollback_to_a_damaged_version_is_refused_and_the_current_one_goes_on(
    agent, tmp_path, capsys
):
    for _ in range(2):
        published(tmp_path, agent)
    back = words_of("update rollback=true", f"out={tmp_path}")
    exported = tmp_path / "versions/0000/controller.npz"
    whole = exported.read_bytes()
    for damage in (whole[:999], b"", whole[:-1]):
        exported.write_bytes(damage)
        line = mistake(back, capsys)
        assert str(exported) in line
        assert "rollback=true" not in line
        assert serving_version(tmp_path).name == "0001"
    exported.write_bytes(whole)
    launch(back)
    assert serving_version(tmp_path).name == "0000"


def published(folder, agent):
    """Publish a version that serves."""

    def write(version):
        agent.export(version / "controller.npz")
        before = serving_version(folder)
        text = json.dumps({"before": before and before.name})
        (version / "update.json").write_text(text)

    serve_version(folder, add_version(folder, write))


@pytest.mark.parametrize(
    "content",
    [
        *(
            None,
            b"",
            b"{",
            b"\xff\xfe",
            b"\0" * 40,
            b"[" * 100_000,
            b"[]",
            b"{}",
            b"3",
            b'"before"',
        ),
        *(json.dumps({"before": b}).encode() for b in (3, True, [], "", "0007", "../..", "0001")),
    ],
)
def test_a_rollback_by_damaged_facts_is_refused_with_what_can_be_done(
    agent, tmp_path, capsys, content
):
    out = tmp_path / "served here"
    for _ in range(2):
        published(out, agent)
    facts = out / "versions/0001/update.json"
    facts.unlink()
    if content is not None:
        facts.write_bytes(content)
    # a copy that somebody keeps beside them is no version
    (out / "versions/0000.bak").mkdir()
    line = mistake(["update", "rollback=true", f"out={out}"], capsys)
    assert str(facts) in line
    assert "rollback=true" not in line
    assert serving_version(out).name == "0001"
    # the command that it names
    command = line.split("`")[1].replace("NUMBER", "0000")
    subprocess.run(command, shell=True, check=True)
    assert serving_version(out).name == "0000"


@pytest.mark.parametrize("rest", ["rollback=true", "log=a checkpoint=runs/latest"])
def test_a_link_that_leads_nowhere_or_is_none_is_refused(agent, tmp_path, capsys, rest):
    for _ in range(2):
        published(tmp_path, agent)
    words = words_of("update", rest, f"out={tmp_path}")
    link = tmp_path / "current"
    serve_version(tmp_path, tmp_path / "versions/0005")
    assert str(link) in mistake(words, capsys)
    link.unlink()
    link.mkdir()
    assert str(link) in mistake(words, capsys)
    assert len([*(tmp_path / "versions").iterdir()]) == 2


def test_updates_go_on_as_the_log_grows(table, agent, words, tmp_path, monkeypatch):
    """As by a timer, each from the version that serves."""
    model = logging_model(tmp_path / "log", agent, table, **EXPLORING)
    monkeypatch.setattr(adaptation, "STEPS", 5)
    out = tmp_path / "out"
    for count in (40, 45):
        serve_requests(model, table, count, seed=count)
        launch(words)
        words = [word for word in words if not word.startswith("checkpoint=")]
        words.append(f"checkpoint={out / 'current'}")
    updates = [facts_in(path) for path in sorted((out / "versions").iterdir())]
    assert [facts.get("requests") for facts in updates] == [None, 40, 85]
    assert updates[2]["before"] == ("0001" if updates[1]["better"] else "0000")


KILLING = """
import os, signal, sys
from knobwise.__main__ import main
from knobwise.agents.calibration.deployed_controller import DeployedController

write, left = DeployedController.export, int(sys.argv.pop(1))

def killed(*arguments):
    global left
    write(*arguments)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

DeployedController.export = killed
main(sys.argv[1:])
"""


@pytest.mark.campaign
def test_a_killed_update_leaves_what_served(table, agent, words, tmp_path, capsys):
    model = logging_model(tmp_path / "log", agent, table, **EXPLORING)
    serve_requests(model, table, 60)
    out = tmp_path / "out"
    for writes in (1, 2):  # while the first version is written, and while the update is
        command = [sys.executable, "-c", KILLING, str(writes), *words]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
        if writes == 2:
            assert digest_in(out / "current") == model.controller.digest
    for _ in range(2):  # given again, it has nothing to add
        launch(words)
        assert sorted(path.name for path in (out / "versions").iterdir()) == ["0000", "0001"]
        assert not [path for path in out.rglob(".*") if path.name != ".lock"]
    exported = out / "versions/0001/controller.npz"
    exported.write_bytes(exported.read_bytes()[:999])
    launch(words)
    assert f"{exported}: is damaged" in capsys.readouterr().err
    digest_in(out / "versions/0002")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("log=.", "requests-….jsonl"),
        ("log=a profile=builtin", "give log=FOLDER"),
        ("", "give log=FOLDER"),
        ("rollback=true out=nothing", "no version before"),
        ("log=a every=40", "every"),
        ("trained_on=builtin profile=builtin", "'builtin'"),
        ("trained_on=a.csv", "trained_on=a.csv: "),
    ],
)
def test_mistakes_of_an_update_are_one_line(words, message, capsys):
    assert message in refused(words_of("update", words), capsys)
