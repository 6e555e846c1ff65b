"""Runs of an earlier version are read: a taught and an untaught controller, one under mean budgets,
a selector, and a training that was stopped.

`tests/earlier_runs.tar.xz` was made at 049d54ee, in this folder's way (`t.parquet` and `f.npz` are
`write_table(40, holes=0.1)`, `b.safetensors` is `small_beams(30)`), by these commands, without what
is large and not read (reports, previous.pt, the checkpoints of epochs):

    train experiment=lean … policy.experts=[ridge] policy.members=2 policy.teacher_hidden=8
    train experiment=lean policy=independent … name=independent
    train experiment=mean_budget … policy.experts=[ridge] policy.members=2 budgets_ms=[8,16]
    train experiment=selector_replay … sft.epochs=1 variants.grpo_recorded.epochs=1
    train experiment=lean policy=independent … optimiser.evaluate_every=2 name=stopped  (Ctrl-C)
"""

import tarfile
from functools import partial
from pathlib import Path

import pytest
from commands import launch, read_json, words_of
from helpers import input_error, small_table, trainer_on

from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.experiments.evidence import selectors
from knobwise.experiments.evidence.controllers import compared, policy_rows
from knobwise.experiments.evidence.decisions import read_decisions
from knobwise.experiments.evidence.summarise import with_references
from knobwise.experiments.evidence.task import DEADLINE

ARCHIVE = Path(__file__).parents[2] / "earlier_runs.tar.xz"
CONTROLLERS = ("lean/x", "lean/independent", "mean_budget/x")
SELECTOR = "selector_replay/x"
STOPPED = words_of("""
    train experiment=lean policy=independent profile=table profile.path=t.parquet
    profile.features=f.npz optimiser.teacher_iterations=4 optimiser.warmup_iterations=4
    optimiser.iterations=4 optimiser.contexts=16 optimiser.evaluate_every=2 policy.hidden=8
    tracking=disabled baselines=false seeds=[0] name=stopped runs=runs tracking.tensorboard=false
    optimiser.rise=0.1
""")


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    """A folder with the runs, as the current one."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("run", "name"), [*((run, "controller") for run in CONTROLLERS), (SELECTOR, "grpo_recorded")]
)
def test_it_is_evaluated_with_the_same_result(run, name, earlier):
    folder = Path("runs", run)
    words = [f"checkpoint={folder}", "json=e.json", "baselines=false"]
    if run != SELECTOR:
        # what was not measured could not be chosen then
        words.append("unprofiled=forbid")
    launch("evaluate", words)
    before, after = (read_json(path)["rows"] for path in (folder / "results.json", "e.json"))
    scores = [
        [row["accuracy"] for row in rows if row["policy"] == name] for rows in (before, after)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


@pytest.mark.parametrize("run", [*CONTROLLERS[:2], SELECTOR])
def test_its_numbers_follow_from_its_decisions(run, earlier):
    folder = Path("runs", run)
    decisions, results = read_decisions(folder), read_json(folder / "results.json")
    if run == SELECTOR:
        rows, differences = selectors.demonstration_rows(decisions, "accuracy")
        pairs = zip([*rows, *differences], [*results["rows"], *results["differences"]], strict=True)
    else:
        rows = policy_rows(DEADLINE, compared(decisions, partial(with_references, DEADLINE)))
        pairs = zip(rows, results["rows"], strict=True)
    for row, wanted in pairs:
        for key, value in wanted.items():
            assert row[key] == pytest.approx(value, abs=1e-9), (row["policy"], key)


def test_they_are_compared(earlier):
    launch("compare", "runs/lean", ["html=c.html"])
    assert Path("c.html").exists()


def test_a_stopped_training_is_kept_and_its_command_begins_another(earlier):
    folder = Path("runs/lean/stopped")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    launch(STOPPED)
    assert {path: path.read_bytes() for path in before} == before
    assert (folder.with_name("stopped-2") / "results.json").exists()


def test_its_state_is_refused_in_a_line(earlier):
    trainer = trainer_on(small_table(40))
    with input_error("last.pt"):
        trainer.resume(Path("runs/lean/stopped/checkpoints/seed0/last.pt"))


@pytest.mark.parametrize("path", [f"{run}/checkpoints/best.pt" for run in CONTROLLERS])
def test_its_settings_have_todays_names(path, earlier):
    config = load_checkpoint(Path("runs", path)).network.config
    assert config.fold_networks == (1 if "independent" in path else 2)
