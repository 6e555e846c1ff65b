"""One set of numbers, three places: everything is logged for real (W&B offline) and read back;
metrics.csv alone."""

import base64
import csv
import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import pytest
import wandb
from hypothesis import strategies as st
from tensorboard.summary.writer import event_file_writer
from wandb_stub import ReceivedRun, forget_wandb, joined, offline_runs

from knobwise.common.errors import InputError
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking import wandb_run
from knobwise.experiments.tracking.metrics_file import MetricsFile
from knobwise.experiments.tracking.tracker import Tracker, short_name, wandb_mode

DIGEST = "sha256:" + "0123456789abcdef" * 4
CONFIG = {"optimiser": {"lr": 0.003}, "loss": {"ends": [math.inf, 1.0]}, "seeds": [0, 1]}
STEPS = (0, 10, 20)
Sessions = dict[str, ReceivedRun]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
UTILITIES = {"controller": (0.5, 0.4, 0.6), "oracle": (0.7, 0.6, 0.8)}
UTILITIES |= {f"baseline_{i}": (0.3, 0.2, 0.4) for i in range(8)}
RESULTS = {
    "profile": {"name": "small profile", "digest": DIGEST, "samples": 60, "configurations": 12},
    "rows": [
        {
            "policy": policy,
            "budget_ms": budget,
            "utility": utility,
            "utility_ci95": [utility - 0.1, utility + 0.1],
        }
        | {f"number {i}": 0.5 for i in range(10)}
        | {"gap_closed": 0.4, "utility_per_seed": [utility, utility, utility]}
        for policy, utilities in UTILITIES.items()
        for budget, utility in zip((None, 10.0, 20.0), utilities, strict=True)
    ],
}


SCORES = [{"Test/Utility": 0.5 + seed / 10, "Test/On_Time_Feasible": 0.9} for seed in (0, 1)]


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path_factory):
    forget_wandb(monkeypatch, tmp_path_factory.mktemp("home"))


def tracker(folder, mode="offline", **more):
    arguments = {
        "name": "lr-0.003",
        "experiment": "controller",
        "job_type": "train",
        "config": CONFIG,
    }
    settings = TrackingSettings(mode=mode, tags=["nightly"], notes="Is a low learning rate better?")
    arguments |= {"settings": settings, "profile": RESULTS["profile"]}
    return Tracker(folder, **arguments | more)


def numbers(seed, step):
    validation = {"Val/Accuracy_Mean": 0.5 + step / 100} if step % 20 == 0 else {}
    return {
        "Train/Loss": 1 / (3 + step + seed),
        "Train/Reward_Mean": 0.1 * seed - step / 7,
    } | validation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two seeds, their test scores, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "lr-0.003"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_SILENT", "WANDB_QUIET"):
            patch.setenv(name, "")  # each alone makes wandb.init raise
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("WANDB_TAGS", "theirs,nightly")
        patch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-9")  # of a program that is gone
        wandb.teardown()
        for seed in (0, 1):
            with tracker(folder, seed=seed, tags=["small"]) as log:
                for step in STEPS:
                    log.log(numbers(seed, step), step)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "best.pt").write_bytes(b"the weights")
        (folder / "report.html").write_text("<p>the report</p>")
        for seed in (0, 1):
            with tracker(folder, seed=seed, tags=["small"], finished=True) as log:
                log.log_scores(SCORES[seed], kept=seed == 1)
        with tracker(folder, job_type="evaluate") as log:
            log.log_results(RESULTS, images={"Utility": PNG})
        assert os.environ["WANDB_SILENT"] == ""
        assert "WANDB_DATA_DIR" not in os.environ
    return folder


def sessions_of(folder):
    """The sessions of every offline run in a folder, by its name."""
    sessions = {}
    for session in offline_runs(folder):
        sessions.setdefault(session.about["displayName"], []).append(session)
    return sessions


def of_kind(session, kind):
    return [record[kind] for record in session.records if record["type"] == kind]


def charts(session):
    """The custom charts of a run, by name."""
    updates = [item for record in of_kind(session, "config") for item in record["update"].items()]
    return {
        key.removeprefix("_wandb.visualize."): chart for key, chart in updates if "visualize" in key
    }


@pytest.fixture(scope="module")
def logged(run):
    return {name: joined(sessions) for name, sessions in sessions_of(run).items()}


def written(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder)).Reload()
    return {(tag, e.step): e.value for tag in reader.Tags()["scalars"] for e in reader.Scalars(tag)}


@pytest.mark.parametrize("seed", [0, 1])
def test_tensorboard_and_wandb_hold_the_numbers_of_metrics_csv(run, logged, seed):
    expected = {
        (name, step): value for step in STEPS for name, value in numbers(seed, step).items()
    }
    assert events(run / "tensorboard" / f"seed{seed}") == pytest.approx(
        expected, rel=1e-6
    )  # event files are float32
    assert logged[f"lr-0.003 s{seed}"].history == [
        {"step": step, **numbers(seed, step)} for step in STEPS
    ]


def test_wandb_run_says_where_it_belongs_and_what_was_best(logged):
    assert set(logged) == {"lr-0.003 s0", "lr-0.003 s1", "lr-0.003"}
    session = logged["lr-0.003 s1"]
    assert session.about == {
        "displayName": "lr-0.003 s1",
        "groupName": "controller",
        "jobType": "train",
        "project": "knobwise",
        "tags": ["nightly", "theirs", "small"],
        "notes": "Is a low learning rate better?",
    }
    assert session.config["run"] == logged["lr-0.003"].config["run"] == "controller/lr-0.003"
    # as on the command line; JSON has no infinity
    wanted = {"optimiser": {"lr": 0.003}, "loss": {"ends": ["inf", 1.0]}}
    wanted |= {"seed": 1, "profile_digest": DIGEST}
    assert session.config.items() >= wanted.items()
    metrics = of_kind(session, "metric")
    steps = {m.get("step_metric") for m in metrics if m.get("name", "").startswith("Train/")}
    assert steps == {"step"}
    rewards = [numbers(1, step)["Train/Reward_Mean"] for step in STEPS]
    assert session.summary["Train/Reward_Mean"] == {"max": max(rewards), "last": rewards[-1]}


def test_test_scores_are_in_the_runs_that_trained(run, logged):
    """So that grouping them shows means and standard deviations; their curves and summaries stay
    what they were."""
    for seed in (0, 1):
        summary = logged[f"lr-0.003 s{seed}"].summary
        assert summary.items() >= SCORES[seed].items()
        assert summary["Train/Loss"] == {"min": 1 / (23 + seed), "last": 1 / (23 + seed)}
    assert not SCORES[0].keys() & logged["lr-0.003"].summary.keys()
    models = [
        (name, artifact)
        for name, session in logged.items()
        for artifact in of_kind(session, "artifact")
        if artifact["type"] == "model"
    ]
    ((name, model),) = models
    assert (name, model["name"]) == ("lr-0.003 s1", f"controller-{run.name}")
    metadata = model["metadata"]
    assert (metadata if isinstance(metadata, dict) else json.loads(metadata)) == SCORES[1]


def test_results_are_logged_inside_the_run_and_in_few_keys(run, logged):
    session = logged["lr-0.003"]
    # every policy's score, and more numbers of the controller
    assert session.summary["Test/oracle/utility"] == 0.7
    assert session.summary["Test/controller/utility_ci95_low"] == 0.4
    assert session.summary["Test/controller/gap_closed"] == 0.4
    assert "Test/oracle/gap_closed" not in session.summary
    keys = {key.split(".")[0] for row in session.history for key in row}
    assert keys == {"Test/policies", "Test/by_budget_table", "report", "Charts/Utility"}
    (chart,) = charts(session).items()
    assert chart[0] == "Test/by_budget"
    axes = {"x": "budget_ms", "y": "utility", "stroke": "policy"}
    assert chart[1]["panel_config"]["fieldSettings"] == axes
    # a scalar of a single step is no curve
    assert not (run / "tensorboard" / "evaluate").exists()
    (picture,) = (run / "wandb").glob("offline-run-*/files/media/images/Charts/*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    artifacts = of_kind(session, "artifact")
    (data,) = (artifact for artifact in artifacts if artifact["type"] == "dataset")
    assert data["name"] == "profile-small-profile"
    assert DIGEST in json.dumps(data["metadata"])


def test_tensorboard_tells_runs_apart_by_their_settings(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    reader = EventAccumulator(str(run / "tensorboard" / "seed1")).Reload()
    content = reader.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert {name: value.number_value for name, value in hparams.items()} == {
        "optimiser.lr": 0.003,
        "seed": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "stage", "seed", "title"),
    [
        ("default", "", None, "lean"),
        ("default", "sft", 2, "sft s2"),
        ("loss.group_size-8_optimiser.lr-0.001", "", 1, "group_size-8_lr-0.001 s1"),
        ("profile-table_profile.path-a.b.csv", "rce", None, "profile-table_path-a.b.csv rce"),
    ],
)
def test_names_of_runs_are_short(name, stage, seed, title):
    assert short_name("lean", name, stage, seed) == title
    assert len(short_name("lean", "x" * 100, stage, seed)) <= 47


def test_a_stage_is_a_run_of_its_own_and_part_of_its_seed(tmp_path):
    """metrics.csv holds the stages of a seed one after the other, W&B and TensorBoard each from
    step 0."""
    sessions = [
        ("sft", 0, None, range(3)),
        ("grpo", 3, 2, range(3)),
        ("grpo", 3, 4, range(2, 3)),  # its last step was not saved
    ]
    for stage, first, resume_step, steps in sessions:
        options = {"stage": stage, "first": first, "resume_step": resume_step}
        with tracker(tmp_path, seed=2, **options) as log:
            for step in steps:
                log.log({"Val/Loss": first + step / 2, wandb_run.THROUGHPUT: 1e3}, step)
    names = {"sft": 0, "grpo": 3}
    wanted = [
        {"seed": "2", "step": str(first + step), f"Val/{stage}/Loss": str(first + step / 2)}
        for stage, first in names.items()
        for step in range(3)
    ]
    assert [{k: v for k, v in row.items() if v} for row in written(tmp_path)] == wanted
    runs = {name: joined(sessions) for name, sessions in sessions_of(tmp_path).items()}
    for stage, first in names.items():
        run = runs[f"lr-0.003 {stage} s2"]
        assert run.config["stage"] == stage
        speed = {wandb_run.THROUGHPUT: 1e3}
        rows = [{"step": step, "Val/Loss": first + step / 2} | speed for step in range(3)]
        assert run.history == rows
    assert ("Val/Loss", 2) in events(tmp_path / "tensorboard" / "seed2" / "grpo")


def test_what_ends_a_run_badly_marks_it_as_failed(tmp_path):
    ends = {130: KeyboardInterrupt(), 1: ValueError("broken"), 0: SystemExit(0)}
    for code, error in ends.items():
        log = tracker(tmp_path / str(code))
        with pytest.raises(type(error)), log:  # noqa: PT012 (what was logged before the end must survive it)
            log.log({"Train/Loss": 1.0}, 0)
            raise error
        (session,) = offline_runs(tmp_path / str(code))
        assert session.history == [{"step": 0, "Train/Loss": 1.0}]
        assert session.exit_code == code


def test_resuming_drops_what_was_logged_after_the_checkpoint(tmp_path, monkeypatch):
    # two event files of one second are told apart by a number only, and `9` sorts after `10`
    now = time.time()
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for seed, mode in ((0, "offline"), (1, "disabled")):
        with tracker(tmp_path, mode, seed=seed) as log:
            for step in range(4):
                log.log({"Train/Loss": float(step)}, step)
    with tracker(tmp_path, seed=0, resume_step=1) as log:
        log.log({"Train/Loss": 20.0}, 2)
    kept = [(r["seed"], r["step"], r["Train/Loss"]) for r in written(tmp_path) if r["seed"] == "0"]
    assert kept == [("0", "0", "0.0"), ("0", "1", "1.0"), ("0", "2", "20.0")]
    assert len([r for r in written(tmp_path) if r["seed"] == "1"]) == 4
    assert events(tmp_path / "tensorboard" / "seed0") == {
        ("Train/Loss", s): v for s, v in enumerate((0.0, 1.0, 20.0))
    }


WHOLE = {
    s: {"Train/Loss": 1 / (s + 1)} | ({"Val/Utility": 0.5 - s / 10} if s < 3 else {})
    for s in range(6)
}


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("Val/Utility", "max"),
        ("Val/sft/Beam_Score_Mean", "max"),
        ("Train/ESS", "max"),
        ("Val/Budget_Violation_Rate", "min"),
        ("Train/sft/Loss", "min"),
        ("Train/KL", None),
        ("Train/Reward_Std", None),
    ],
)
def test_which_value_is_the_best_of_a_run(name, best):
    assert bool(wandb_run.HIGHER_IS_BETTER.search(name)) == (best == "max")
    assert bool(wandb_run.LOWER_IS_BETTER.search(name)) == (best == "min")


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_where_wandb_does_not_start_the_rest_goes_on(tmp_path, monkeypatch, capfd, mode):
    """Its service is a process of its own; on a busy machine, or with a full disk, it may not come
    up."""
    monkeypatch.setattr(wandb, "init", Mock(side_effect=OSError("No space left on device")))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    environment = dict(os.environ)
    with tracker(tmp_path / "run", mode, seed=0) as log:
        log.log({"Train/Loss": 1.0}, 0)
        log.log_results(RESULTS)
    assert "No space left on device" in capfd.readouterr().err
    assert (log.mode, log.settings.mode) == ("disabled", mode)
    assert [row["Train/Loss"] for row in written(tmp_path / "run")] == ["1.0"]
    assert os.environ == environment


def test_disabled_tracker_still_writes_metrics_csv(tmp_path):
    quiet = TrackingSettings(mode="disabled", tensorboard=False)
    with tracker(tmp_path, settings=quiet, seed=0) as log:
        log.log({"Train/Loss": 1.0}, 0)
        log.log_results(RESULTS)
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
    assert sessions_of(tmp_path)["lr-0.003 s1"][0].history == [{"step": 0, "Train/Loss": 2.0}]


def test_mode_follows_settings_then_environment_then_key(monkeypatch):
    assert wandb_mode(TrackingSettings()) == "offline"
    Path(os.environ["NETRC"]).write_text("machine api.wandb.ai login user password 0\n")
    for variable, mode in (("", "online"), ("disabled", "disabled"), ("dryrun", "offline")):
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

ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["Train/Loss", "Val/Loss", 'odd, "name"']),
        st.floats(allow_nan=False),
        min_size=1,
    ),
    min_size=1,
    max_size=6,
)


def values_of(row):
    return {
        name: float(value) for name, value in row.items() if value and name not in ("seed", "step")
    }


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(rows=ROWS)
def test_metrics_file_gives_back_what_was_written(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("metrics")
    file = MetricsFile(folder / "metrics.csv", seed=3)
    for step, row in enumerate(rows):
        file.append(step, row)
    assert [values_of(row) for row in written(folder)] == rows


def test_metrics_file_drops_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("seed,step,Train/Loss,Val/Loss\n0,0,1.0,2.0\n1,0,1.5,\n0,1,0.")
    MetricsFile(path, seed=0, resume_step=5).append(1, {"Train/Loss": 0.5})
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


def append_many(path, seed, rows):
    """What one process of several does: its rows hold ever new names, so that the file is rewritten
    again and again."""
    file = MetricsFile(path, seed)
    for step in range(rows):
        file.append(step, {f"seed{seed}/{step // 5}": seed + step / 100})


def test_several_processes_lose_nothing(tmp_path):
    path, rows = tmp_path / "metrics.csv", 40
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=append_many, args=(path, seed, rows)) for seed in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    lines = written(tmp_path)
    assert len(lines) == 3 * rows
    for seed in range(3):
        of_seed = [row for row in lines if row["seed"] == str(seed)]
        assert [int(row["step"]) for row in of_seed] == list(range(rows))
        for step, row in enumerate(of_seed):
            assert values_of(row) == {f"seed{seed}/{step // 5}": seed + step / 100}
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]
