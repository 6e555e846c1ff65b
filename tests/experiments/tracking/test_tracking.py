"""One set of numbers, three places: everything is logged for real (W&B offline) and read back;
metrics.csv alone. What the runs of the command line log is in `test_tracking_online`."""

import csv
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import pytest
import torch
import wandb
from hypothesis import strategies as st
from run_folders import write_run
from tensorboard.summary.writer import event_file_writer
from wandb_stub import forget_wandb, offline_runs

from knobwise.agents.training.state import TrainingState
from knobwise.common.errors import InputError
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_results, wandb_run
from knobwise.experiments.tracking.metrics_file import MetricsFile
from knobwise.experiments.tracking.tracker import THROUGHPUT, Tracker, short_name, wandb_mode
from knobwise.experiments.tracking.wandb_results import summaries_of

CONFIG = {"optimiser": {"lr": 0.003}, "loss": {"ends": [math.inf, 1.0]}, "seeds": [0, 1]}
STEPS = (0, 10, 20)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path_factory):
    forget_wandb(monkeypatch, tmp_path_factory.mktemp("home"))


def tracker(folder, mode="offline", **more):
    settings = TrackingSettings(mode=mode, tags=["nightly"], notes="Is a low learning rate better?")
    arguments = {"name": "lr-0.003", "experiment": "controller", "job_type": "train"}
    arguments["state"] = TrainingState("")
    return Tracker(folder, **arguments | {"config": CONFIG, "settings": settings} | more)


def numbers(step):
    validation = {"Val/Accuracy_Mean": 0.5 + step / 100} if step % 20 == 0 else {}
    return {"Train/Loss": 1 / (3 + step), "Train/Reward_Mean": -step / 7} | validation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with one seed, in a folder whose name would be a pattern to some."""
    folder = tmp_path_factory.mktemp("runs") / "lr[1]"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_SILENT", "WANDB_QUIET"):
            patch.setenv(name, "")  # each alone makes wandb.init raise
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("WANDB_TAGS", "theirs,nightly")
        patch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-9")  # of a program that is gone
        wandb.teardown()
        with tracker(folder, seed=1, tags=["small"], profile={"digest": "sha256:0"}) as log:
            for step in STEPS:
                log.log(numbers(step), step)
        assert os.environ["WANDB_SILENT"] == ""
        assert "WANDB_DATA_DIR" not in os.environ
    return folder


def saved(iteration, rows):
    """Where a training stands that was saved in this iteration, with so many rows logged."""
    return TrainingState("", iteration=iteration, rows=rows)


def runs_of(folder):
    """The offline runs in a folder, by name."""
    found = offline_runs(folder)
    by_name = {run.about["displayName"]: run for run in found}
    assert len(by_name) == len(found)
    return by_name


def written(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder)).Reload()
    return {(tag, e.step): e.value for tag in reader.Tags()["scalars"] for e in reader.Scalars(tag)}


def test_tensorboard_holds_the_numbers(run):
    expected = {(name, step): value for step in STEPS for name, value in numbers(step).items()}
    # event files are float32
    assert events(run / "tensorboard" / "seed1") == pytest.approx(expected, rel=1e-6)


def test_tensorboard_tells_runs_apart_by_their_settings(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    reader = EventAccumulator(str(run / "tensorboard" / "seed1")).Reload()
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    values = {name: value.number_value for name, value in hparams.items()}
    assert values.items() >= {"optimiser.lr": 0.003, "seed": 1.0}.items()


def test_wandb_run_says_where_it_belongs_and_what_was_best(run):
    ((name, session),) = runs_of(run).items()
    assert session.about == {
        "displayName": name,
        "groupName": "controller",
        "jobType": "train",
        "project": "knobwise",
        "tags": ["nightly", "theirs", "small"],
        "notes": "Is a low learning rate better?",
    }
    assert name == "lr-0.003 s1"
    # as on the command line; JSON has no infinity
    wanted = {"optimiser": {"lr": 0.003}, "loss": {"ends": ["inf", 1.0]}}
    wanted |= {"seed": 1, "profile_digest": "sha256:0", "run": "controller/lr-0.003"}
    assert session.config.items() >= wanted.items()
    metrics = [record["metric"] for record in session.records if record["type"] == "metric"]
    steps = {m.get("step_metric") for m in metrics if m.get("name", "").startswith("Train/")}
    assert steps == {"step"}
    assert session.summary["Train/Reward_Mean"] == {"max": 0, "last": -20 / 7}


@pytest.mark.parametrize("stop", [None, 1, 3])
def test_a_number_that_was_nan_once_has_a_best_all_the_same(tmp_path, stop):
    """While it trains, at its end, and after it was stopped before this step; what was logged is
    as it was."""
    values = [math.nan, 0.3, math.nan, 0.5, 0.4]
    rows = [{"Val/Utility": value, "Train/Loss": value, "Val/KL": value} for value in values]
    with tracker(tmp_path, seed=0) as log:
        for step, row in enumerate(rows[:stop]):
            log.log(row, step)
    if stop is not None:
        with tracker(tmp_path, seed=0, state=saved(stop, stop)) as log:
            for step, row in enumerate(rows[stop:], stop):
                log.log(row, step)
    (session,) = offline_runs(tmp_path)
    logged = [row["Val/Utility"] for row in session.history]
    assert logged == pytest.approx(values, nan_ok=True)
    assert session.summary["Val/Utility"] == {"max": 0.5, "last": 0.4}
    assert session.summary["Train/Loss"] == {"min": 0.3, "last": 0.4}
    assert session.summary["Val/KL"] == {"last": 0.4}
    updates = [record["summary"]["update"] for record in session.records if "summary" in record]
    bests = [update["Val/Utility"].get("max") for update in updates if "Val/Utility" in update]
    # of each step, and at the end
    assert bests == [None, 0.3, 0.3, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "stage", "seed", "title"),
    [
        ("default", "", None, "lean"),
        ("default", "sft", 2, "sft s2"),
        ("loss.group_size-8_optimiser.lr-0.001", "", 1, "group_size-8_lr-0.001 s1"),
        ("profile-table_profile.path-a.b.csv", "rce", None, "profile-table_path-a.b.csv rce"),
        ("baselines-false_policy.hidden-32_seeds--0-1", "", 0, "hidden-32 s0"),
        (f"{'x' * 50}-01234567", "", None, f"{'x' * 30}…-01234567"),
    ],
)
def test_names_of_runs_are_short(name, stage, seed, title):
    assert short_name("lean", name, stage, seed) == title
    assert len(short_name("lean", "x" * 100, stage, seed)) <= 47


def test_a_stage_is_a_run_of_its_own_and_part_of_its_seed(tmp_path):
    """metrics.csv holds the stages of a seed one after the other, W&B and TensorBoard each from
    step 0."""
    sessions = [
        ("sft", 0, range(3)),
        ("grpo", 3, range(3)),
        ("grpo", 3, range(2, 3)),  # its last step was not saved
        ("sft", 0, range(2, 3)),  # nor was that of the stage before
        ("grpo", 3, range(2, 3)),
    ]
    for stage, first, steps in sessions:
        state = saved(steps[0], steps[0])
        with tracker(tmp_path, seed=2, stage=stage, first=first, state=state) as log:
            for step in steps:
                log.log({"Train/Loss": first + step / 2, THROUGHPUT: 1e3}, step)
    rows = written(tmp_path)
    assert [row["step"] for row in rows] == list("012345")
    runs = runs_of(tmp_path)
    for stage, first in {"sft": 0, "grpo": 3}.items():
        values = [first + step / 2 for step in range(3)]
        logged = [row for row in rows if row[f"Train/{stage}/Loss"]]
        assert list(map(values_of, logged)) == [{f"Train/{stage}/Loss": value} for value in values]
        run = runs[f"lr-0.003 {stage} s2"]
        assert run.config["stage"] == stage
        history = [{"step": step, "Train/Loss": value} for step, value in enumerate(values)]
        assert run.history == [row | {THROUGHPUT: 1e3} for row in history]
    assert ("Train/Loss", 2) in events(tmp_path / "tensorboard" / "seed2" / "grpo")


def test_what_ends_a_run_badly_marks_it_as_failed(tmp_path):
    ends = (KeyboardInterrupt(), ValueError("broken"))
    for error in ends:
        folder = tmp_path / type(error).__name__
        log = tracker(folder)
        with pytest.raises(type(error)), log:  # noqa: PT012 (what was logged before the end must survive it)
            log.log({"Train/Loss": 1.0}, 0)
            raise error
        (session,) = offline_runs(folder)
        assert session.history == [{"step": 0, "Train/Loss": 1.0}]
        assert session.exit_code == 1


def test_resuming_drops_what_was_logged_after_the_checkpoint(tmp_path, monkeypatch):
    # two event files of one second are told apart by a number only, and `9` sorts after `10`
    now = time.time()
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for seed, mode in ((0, "offline"), (1, "disabled")):
        with tracker(tmp_path, mode, seed=seed) as log:
            for step in range(4):
                log.log({"Train/Loss": float(step)}, step)
    with tracker(tmp_path, seed=0, state=saved(2, 2)) as log:
        log.log({"Train/Loss": 20.0}, 2)
    kept = [(r["seed"], r["step"], r["Train/Loss"]) for r in written(tmp_path) if r["seed"] == "0"]
    assert kept == [("0", "0", "0.0"), ("0", "1", "1.0"), ("0", "2", "20.0")]
    assert len([r for r in written(tmp_path) if r["seed"] == "1"]) == 4
    assert events(tmp_path / "tensorboard" / "seed0") == {
        ("Train/Loss", s): v for s, v in enumerate((0.0, 1.0, 20.0))
    }


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_where_wandb_does_not_start_the_rest_goes_on(tmp_path, monkeypatch, capfd, mode):
    """Its service is a process of its own; on a busy machine, or with a full disk, it may not come
    up."""
    monkeypatch.setattr(wandb, "init", Mock(side_effect=OSError("No space left on device")))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    environment = dict(os.environ)
    with tracker(tmp_path / "run", mode, seed=0) as log:
        log.log({"Train/Loss": 1.0}, 0)
        log.log_results({}, {}, None)
    assert "No space left on device" in capfd.readouterr().err
    assert (log.mode, log.settings.mode) == ("disabled", mode)
    assert [row["Train/Loss"] for row in written(tmp_path / "run")] == ["1.0"]
    assert os.environ == environment


def test_histograms_are_logged_and_kept_up_to_the_checkpoint(tmp_path):
    values = {0: torch.tensor([-9.0, 0.1, 0.2]), 1: torch.tensor([0.6]), 2: torch.tensor([1.0])}
    with tracker(tmp_path, seed=0, stage="grpo") as log:
        for step in (0, 1):
            log.log({"Val/Loss": 1.0, "Val/Advantages": values[step]}, step)
    with tracker(tmp_path, seed=0, stage="grpo", state=saved(0, 1)) as log:
        log.log({"Val/Loss": 2.0, "Val/Advantages": values[2]}, 1)
    (session,) = offline_runs(tmp_path)
    counts = [row["Val/Advantages.values"] for row in session.history]
    assert [sum(row) for row in counts] == [3, 1]
    # bins are half a unit wide, from -5 on
    assert (counts[0][0], counts[0][10], counts[1][12]) == (1, 2, 1)
    rows = list(csv.DictReader((tmp_path / "histograms.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["0", "1"]
    assert rows[0]["Val/grpo/Advantages[0]"] == "2.0"
    assert "Advantages" not in (tmp_path / "metrics.csv").read_text()


def test_disabled_tracker_still_writes_metrics_csv(tmp_path):
    quiet = TrackingSettings(mode="disabled", tensorboard=False)
    with tracker(tmp_path, settings=quiet, seed=0) as log:
        log.log({"Train/Loss": 1.0}, 0)
        log.log_results({}, {}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_key_without_a_network_falls_back_to_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_run, "PATIENCE_S", 1)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    settings = TrackingSettings()
    with tracker(tmp_path, settings=settings, seed=0) as log:
        log.log({"Train/Loss": 1.0}, 0)
    assert settings.mode == log.mode == "offline"
    (session,) = offline_runs(tmp_path)
    assert session.history == [{"step": 0, "Train/Loss": 1.0}]
    with pytest.raises(InputError, match="tracking"):
        tracker(tmp_path / "new", mode="online", seed=0).__enter__()
    # what is trained already is not to be lost
    with tracker(tmp_path, mode="online", seed=1) as log:
        log.log({"Train/Loss": 2.0}, 0)
    assert log.mode == "offline"
    assert runs_of(tmp_path)["lr-0.003 s1"].history == [{"step": 0, "Train/Loss": 2.0}]


@pytest.mark.parametrize("words", [[], ["--host", "https://wandb.example.com"]])
def test_a_login_of_wandb_is_noticed(words, tmp_path, monkeypatch):
    """wandb 0.31 has a new name for its own server, and keeps that of another in a file."""
    assert wandb_mode(TrackingSettings()) == "offline"
    command = [sys.executable, "-m", "wandb", "login", "--no-verify", *words, "0" * 40]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert wandb_mode(TrackingSettings()) == "online"
    # a key of one server is none of another
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.com")
    assert wandb_mode(TrackingSettings()) == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.wandb.ai")
    assert wandb_mode(TrackingSettings()) == ("offline" if words else "online")


def test_mode_follows_settings_then_environment_then_key(monkeypatch):
    assert wandb_mode(TrackingSettings()) == "offline"
    Path(os.environ["NETRC"]).write_text("machine api.wandb.ai login user password 0\n")
    for variable, mode in (("", "online"), ("disabled", "disabled"), ("offline", "offline")):
        monkeypatch.setenv("WANDB_MODE", variable)
        assert wandb_mode(TrackingSettings()) == mode
        assert wandb_mode(TrackingSettings(mode="offline")) == "offline"
    Path(os.environ["NETRC"]).unlink()
    for mode in ("online", "sometimes"):
        with pytest.raises(InputError, match=r"tracking\.mode"):
            wandb_mode(TrackingSettings(mode=mode))
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(InputError, match="WANDB_MODE"):
        wandb_mode(TrackingSettings())


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"project": "a" * 129}, r"tracking\.project"),
        *(({"project": f"a{sign}b"}, r"tracking\.project") for sign in "/\\#?%:"),
        ({"tags": [""]}, r"tracking\.tags"),
        ({"tags": ["a" * 65]}, r"tracking\.tags"),
        ({}, "WANDB_PROJECT"),
    ],
)
def test_names_that_wandb_would_refuse_are_refused(settings, option, monkeypatch):
    """Where nothing is logged there, any name will do."""
    monkeypatch.setenv("WANDB_PROJECT", "a/b" if not settings else "")
    with pytest.raises(InputError, match=option):
        wandb_mode(TrackingSettings(mode="offline", **settings))
    assert wandb_mode(TrackingSettings(mode="disabled", **settings)) == "disabled"
    good = {"project": "a b.c-d_é,;@&", "tags": ["a", "a" * 64]}
    assert wandb_mode(TrackingSettings(mode="offline", **good)) == "offline"


# -- metrics.csv gives back what was written, whatever came between --------------------------------

NAMES = st.sampled_from(["Train/Loss", "Val/Loss", 'odd, "name"'])
ROW = st.dictionaries(NAMES, st.floats(allow_nan=False), min_size=1)


def values_of(row):
    values = {name: float(value) for name, value in row.items() if value}
    return {name: values[name] for name in values.keys() - {"seed", "step"}}


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_metrics_file_gives_back_what_was_written(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("metrics")
    file = MetricsFile(folder / "metrics.csv", seed=3)
    for step, row in enumerate(rows):
        file.append(step, row)
    assert [values_of(row) for row in written(folder)] == rows


def test_metrics_file_drops_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.")
    file = MetricsFile(path, seed=0)
    assert file.cut(end=4) == 1
    file.append(1, {"Train/Loss": 0.5})
    assert path.read_text() == "seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.5,\n"


def test_seeds_side_by_side_keep_their_rows_and_columns(tmp_path):
    path = tmp_path / "metrics.csv"
    first, second = MetricsFile(path, seed=0), MetricsFile(path, seed=1)
    first.append(0, {"Train/Loss": 1.0})
    second.append(0, {"Val/Loss": 2.0})
    first.append(1, {"Train/Loss": 3.0, "Val/Loss": 4.0})
    MetricsFile(path, seed=None).append(0, {"Test/Loss": 5.0})
    assert path.read_text().splitlines() == [
        "seed,step,Train/Loss,Val/Loss,Test/Loss",
        "0,0,1.0,,",
        "1,0,,2.0,",
        "0,1,3.0,4.0,",
        ",0,,,5.0",
    ]


def append_many(path, seed):
    """What one process of several does: its rows hold ever new names, so that the file is rewritten
    again and again."""
    file = MetricsFile(path, seed)
    for step in range(40):
        file.append(step, {f"seed{seed}/{step // 5}": seed + step / 100})


@pytest.mark.campaign
def test_several_processes_lose_nothing(tmp_path):
    path = tmp_path / "metrics.csv"
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=append_many, args=(path, seed)) for seed in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for seed in range(3):
        rows = [values_of(row) for row in written(tmp_path) if row["seed"] == str(seed)]
        assert rows == [{f"seed{seed}/{step // 5}": seed + step / 100} for step in range(40)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_what_was_not_measured_is_not_logged(tmp_path):
    run = write_run(tmp_path / "r")
    known = summaries_of(read_results(run))
    results = read_results(run)
    for row in results["rows"]:
        row |= {key: None for key in row if key not in ("policy", "budget_ms", "decision_us_p50")}
        row |= {"measured_decisions": 0, "decisions": 60}
    assert "Test/controller/utility" in known
    assert summaries_of(results) == {"Test/controller/decision_us_p50": 12.0}
    tables = wandb_results._tables(results, run)
    assert "Test/decisions" not in tables
    columns = tables["Test/policies"].columns
    assert not {"utility_ci95_low", "utility_ci95_high"} & {*columns}
    assert wandb_results._curves(results).keys() == {"Knobs/crops"}
