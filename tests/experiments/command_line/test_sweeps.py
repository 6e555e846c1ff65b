"""Sweeps: which jobs there are, what is refused, and all three launchers through the command
line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commands import (
    OPTIMISER,
    TABLE,
    Capture,
    Patch,
    ctrl_c,
    refused,
    started,
    stop_when,
    write_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.experiments.command_line.compose import CONF, question_of, read_settings, schema_of
from knobwise.experiments.command_line.sweep import jobs_of
from knobwise.experiments.command_line.sweep_jobs import result_line
from knobwise.experiments.results.run_folder import UNFINISHED
from knobwise.experiments.results.sweep_folder import Outcome, read_outcome
from knobwise.experiments.train import run

SWEPT = {
    "group_size": [
        ["loss.group_size=5"],
        ["loss.group_size=8"],
        ["loss.group_size=16"],
        ["loss.group_size=64"],
    ],
    "objective": [["loss=exact"], ["loss=sampled"]],
    "advantages": [
        [f"loss.advantage={name}"] for name in ("zscore", "centred", "rank", "unnormalised")
    ],
    "heads": [[f"policy={name}"] for name in ("utility", "independent")],
    "reward_coefficients": [
        [f"reward.beta={b}", f"reward.gamma={g}"] for b in ("0", "0.5") for g in (0, 1, 10)
    ],
    "miss": [["reward.miss=0"], ["reward.miss=0.2"], ["reward.miss=0.5"]],
    "kl": [[f"loss.kl_to_ref_coeff={weight}"] for weight in ("0", "0.02", "0.1", "0.5")],
    "clip": [[f"loss.clip_epsilon={width}"] for width in ("0.1", "0.2", "0.4")],
    "ppo": [["loss=sampled"], ["loss=ppo"]],
    "leave_one_out": [[f"split.leave_out={name}"] for name in ("text_vqa", "coco_vqa", "okvqa")],
}
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
QUICK = [*OPTIMISER, "policy.members=2", "seeds=[0]", "baselines=false", "own_cost=false"]
ADDRESS = "hydra.launcher.ray.init.address="
OBJECTIVE = ["train", "-m", "experiment=objective", *TABLE, *QUICK]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder with a long table and its features."""
    monkeypatch.chdir(tmp_path)
    write_table()
    return tmp_path


def finished(folder: Path) -> Path:
    """A folder with results that a sweep can read."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"policy": "controller", "budget_ms": None, "utility": 0.5, "utility_ci95": [0.4, 0.6]}
    (folder / "results.json").write_text(json.dumps({"rows": [row]}))
    return folder


def outcomes(runs: str = "runs") -> list[Outcome]:
    """How the jobs of the only sweep fare."""
    (sweep,) = (path.parent for path in Path(runs).glob("multirun/*/*/jobs.yaml"))
    results_of = [read_outcome(sweep, number) for number in range(1, 10)]
    return [outcome for outcome in results_of if outcome is not None]


# -- which jobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_job_of_every_experiment_file_is_understood(name: str) -> None:
    words = [
        f"experiment={name}",
        *(["beams.path=beams.json"] if name == "selector_replay" else []),
    ]
    schema = schema_of("train", words)
    jobs = jobs_of(schema, ["-m", *words])
    assert [[word for word in job if word not in words] for job in jobs] == SWEPT.get(name, [[]])
    configs = [read_settings(schema, job) for job in jobs]
    assert all(config.experiment == name for config in configs)
    assert all(configs.count(config) == 1 for config in configs), "two jobs are the same"
    # without -m it is one run, which is one of the sweep's where there is a sweep
    assert read_settings(schema, words) in configs
    assert "?" in question_of(name)


def test_the_command_line_holds_where_the_file_says_otherwise() -> None:
    words = [
        "-m",
        "experiment=group_size",
        "loss.group_size=4",
        "policy.hidden=8,16",
        "hydra/launcher=joblib",
    ]
    common = {"experiment=group_size", "loss.group_size=4"}
    assert [set(job) for job in jobs_of("train", words)] == [
        common | {f"policy.hidden={width}"} for width in (8, 16)
    ]


def test_several_experiments_each_with_its_own_sweep() -> None:
    jobs = jobs_of("train", ["-m", "experiment=objective,lean", "seeds=[0],[1,2]"])
    runs = [
        {"experiment=objective", "loss=exact"},
        {"experiment=objective", "loss=sampled"},
        {"experiment=lean"},
    ]
    assert [set(job) for job in jobs] == [
        run | {f"seeds={seeds}"} for run in runs for seeds in ("[0]", "[1,2]")
    ]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["policy.hidden=range(8,24,8)"], [["policy.hidden=8"], ["policy.hidden=16"]]),
        (["policy.hidden=choice(8,16)"], [["policy.hidden=8"], ["policy.hidden=16"]]),
        (["loss=glob(*)"], [["loss=exact"], ["loss=ppo"], ["loss=sampled"]]),
        (
            ["seeds=[0],[1]", "loss=exact"],
            [["seeds=[0]", "loss=exact"], ["seeds=[1]", "loss=exact"]],
        ),
        (
            ["profile.path='a,b.csv','c d.csv'"],
            [["profile.path='a,b.csv'"], ["profile.path='c d.csv'"]],
        ),
        (["+hydra.sweeper.params.seeds='[0],[1]'"], [["seeds=[0]"], ["seeds=[1]"]]),
        (
            ["experiment=glob([lean*,seeds*])"],
            [[f"experiment={name}"] for name in ("lean", "seeds", "seeds_small")],
        ),
    ],
)
def test_hydras_ways_to_list_values(words: list[str], wanted: list[list[str]]) -> None:
    assert jobs_of("train", words) == wanted


@pytest.mark.parametrize(
    "words",
    ["selector,selector_warm_up", "choice(selector,selector_warm_up)", "glob(selector_*w*_*)"],
)
def test_several_experiments_of_selectors(words: str) -> None:
    jobs = jobs_of(schema_of("train", [f"experiment={words}"]), [f"experiment={words}"])
    assert len(jobs) == 2
    assert ["experiment=selector_warm_up"] in jobs


def test_words_are_passed_on_as_they_were_given() -> None:
    words = ['profile.path="a (1).csv"', "baselines=false", "variants.mine={live: true}", "x=1e-3"]
    assert jobs_of("train", words) == [words]


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["exact", "sampled"]), min_size=1, max_size=2, unique=True),
)
def test_jobs_are_every_combination_once_the_last_key_first(
    sizes: list[int], losses: list[str]
) -> None:
    words = [f"policy.hidden={','.join(map(str, sizes))}", f"loss={','.join(losses)}"]
    assert jobs_of("train", words) == [
        [f"policy.hidden={size}", f"loss={loss}"] for size in sizes for loss in losses
    ]


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=nothing"], "experiment=nothing: must be one of advantages, "),
        (["experiment=lean,selector"], "two commands"),
        (["experiment=glob(*_seeds)"], "two commands"),
        (["loss=glob(nothing*)"], "has no job"),
        (["policy=utility,utility"], "twice"),
        (["hydra/launcher=slurm"], "hydra/launcher=slurm: must be one of basic, joblib, ray"),
        (
            ["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"],
            "hydra.launcher.n_jobs=0: must be at least 1, or -1",
        ),
        (
            ["hydra/launcher=ray", f"{ADDRESS}a..b:6379"],
            f"{ADDRESS}a..b:6379: no Ray cluster answers",
        ),
        (["policy.hidden=8,16,wide"], "policy.hidden=wide"),
        (["policy.layers=1,0"], "policy.layers"),
        (["polici.hidden=8,16"], "did you mean policy.hidden=8?"),
        (["policy.layers=range(1)"], "policy.layers"),
        (["policy.hidden"], "policy.hidden"),
        (["policy.hidden=interval(1,3)"], "interval"),
        (["profile.path=t.parquet,gone.parquet"], "gone.parquet"),
        (["seeds=[0],[1,1]"], "none twice"),
        (["split.train=0.5,0.9"], "train=0.9"),
        (["tracking=disabled,online"], "WANDB_API_KEY"),
        (["runs=t.parquet", "loss=exact,sampled"], "t.parquet"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_mistake_in_any_job_is_one_line_before_the_first_runs(
    launcher: str, words: list[str], message: str, folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("NETRC", str(folder / "none"))
    keys = {word.split("=")[0] for word in words}
    others = [word for word in TABLE + QUICK if word.split("=")[0] not in keys]
    assert message in refused(
        ["train", "-m", *others, f"hydra/launcher={launcher}", *words], capsys
    )


def test_ray_that_is_not_installed_is_said(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'knobwise\[ray\]'"):
        jobs_of("train", ["hydra/launcher=ray", "loss=exact,sampled"])


# -- in turn ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder in which the sweep over objectives ran, one job after the other, and what it
    printed."""
    place = tmp_path_factory.mktemp("swept")
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
    ):
        patch.chdir(place)
        write_table()
        assert main(OBJECTIVE) == 0
    return place, out.getvalue(), err.getvalue()


@pytest.fixture
def in_turn(swept: tuple[Path, str, str], folder: Path) -> tuple[str, str]:
    """What that sweep printed, in a copy of its folder."""
    shutil.copytree(swept[0], folder, symlinks=True, dirs_exist_ok=True)
    return swept[1:]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which that sweep was stopped by Ctrl-C in its second job, and what it printed."""
    place = tmp_path_factory.mktemp("interrupted")
    second_job = ctrl_c(
        lambda trainer: (trainer.loss.objective, trainer.iteration) == ("sampled", 9)
    )
    with pytest.MonkeyPatch.context() as patch, second_job, redirect_stderr(StringIO()) as err:
        patch.chdir(place)
        write_table()
        assert main(OBJECTIVE) == 130
    return place, err.getvalue()


@pytest.fixture
def stopped(interrupted: tuple[Path, str], folder: Path) -> str:
    """What that sweep printed, in a copy of its folder."""
    shutil.copytree(interrupted[0], folder, symlinks=True, dirs_exist_ok=True)
    return interrupted[1]


def numbers(runs: str) -> dict[str, Any]:
    """All that jobs found, by objective, without what differs from time to time."""
    results_of: dict[str, Any] = {}
    for path in Path(runs).glob("objective/*/results.json"):
        results = json.loads(path.read_text())
        for row in results["rows"]:
            row.pop("decision_us_p50")
        objective = next(
            name for name in ("exact", "sampled") if f"loss={name}" in results["command"]
        )
        metrics = pl.read_csv(path.with_name("metrics.csv")).rows()
        decisions = pl.read_parquet(path.with_name("decisions.parquet")).drop("decision_us").rows()
        results_of[objective] = (results["rows"], results["validation_utility"], metrics, decisions)
    return results_of


def test_jobs_in_turn_say_how_they_fare(in_turn: tuple[str, str]) -> None:
    table, message = in_turn
    lines = [line for line in message.splitlines() if line.startswith(("sweep", "job"))]
    result = r"utility 0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]"
    utility = rf"{result}, \d+ s"
    patterns = [
        "sweep: 2 jobs",
        r"job 1 of 2 \(loss=exact\) …",
        rf"job 1 of 2 \(loss=exact\): {utility}",
        r"job 2 of 2 \(loss=sampled\) …",
        rf"job 2 of 2 \(loss=sampled\): {utility}",
        r"jobs: 2/2, done in \d+ s",
    ]
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line)
    assert re.search(rf"^1 +loss=exact +{result} +\d+ s +runs/objective/", table, re.MULTILINE)
    assert "compare them: knobwise compare runs/objective\n" in table
    assert [outcome.state for outcome in outcomes()] == ["finished"] * 2
    assert {Path(str(outcome.folder)).parent.name for outcome in outcomes()} == {"objective"}
    assert "\x1b" not in message


def test_a_finished_sweep_is_left_alone_and_run_anew(in_turn: tuple[str, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("runs/objective").rglob("*")}
    assert main(OBJECTIVE) == 0
    assert len(list(Path("runs/objective").iterdir())) == 4
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_job_that_fails_does_not_keep_the_others_from_running_and_is_run_again(
    folder: Path, capsys: Capture
) -> None:
    """A budget of 0 ms shows when the run begins. The finished job is left out where its run and
    data are the same."""
    words = ["train", "-m", *TABLE, *QUICK, "budgets_ms=[0],[2]"]
    runs: list[list[str]] = []

    def left_out() -> bool:
        assert main(words) == 2
        assert [outcome.state for outcome in outcomes()] == ["failed", "finished"]
        printed = capsys.readouterr()
        assert printed.err.splitlines()[-1].startswith(
            "knobwise: job 1 of 2 (budgets_ms=[0]): budgets_ms"
        )
        assert "budgets_ms=[2]" in printed.out
        assert "Traceback" not in printed.err
        runs.append(sorted(path.name for path in Path("runs/controller").iterdir()))
        return "finished before and not run again: 1 of them" in printed.err

    assert not left_out()
    assert left_out()
    assert runs[0] == runs[1]
    Path(str(outcomes()[1].folder), "results.json").unlink()
    assert not left_out()
    write_table(seed=1)
    assert main(words) == 2
    assert "finished before" not in capsys.readouterr().err
    assert len(list(Path("runs").glob("multirun/controller/*"))) == 2


def test_an_error_of_the_program_is_told_from_a_mistake(folder: Path, capsys: Capture) -> None:
    with ctrl_c(
        lambda trainer: trainer.loss.objective == "exact", RuntimeError("out of memory\nand more")
    ):
        assert main(OBJECTIVE) == 1
    printed = capsys.readouterr().err
    assert [outcome.state for outcome in outcomes()] == ["failed", "finished"]
    assert printed.splitlines()[-1].startswith(
        "knobwise: job 1 of 2 (loss=exact): RuntimeError: out of memory; repeat"
    )
    assert "Traceback" in printed  # where it happened, above


def test_ctrl_c_ends_a_sweep_and_the_same_command_goes_on(
    stopped: str, swept: tuple[Path, str, str], capsys: Capture
) -> None:
    assert "1 of 2 jobs are finished" in stopped
    assert "repeat the command to resume" in stopped
    assert [outcome.state for outcome in outcomes()] == ["finished", "stopped"]
    assert main([*OBJECTIVE, "hydra/launcher=basic"]) == 0  # by whichever launcher
    assert "finished before and not run again: 1 of them" in capsys.readouterr().err
    assert [outcome.state for outcome in outcomes()] == ["finished", "finished"]
    assert len(list(Path("runs/objective").iterdir())) == 2
    assert numbers("runs") == numbers(str(swept[0] / "runs"))


def test_jobs_of_other_code_are_kept_and_said(
    stopped: str, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr("knobwise.experiments.tracking.tracker.code_digest", lambda: "edited")
    with ctrl_c(lambda trainer: True):
        assert main(OBJECTIVE) == 130
    assert "1 of them, 1 by other code; another name=… trains all anew" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["", '{"state": "runn', '{"state": "running"}'])
def test_a_job_that_was_killed_before_it_could_note_its_end_is_not_run_again(
    left: str, stopped: str, capsys: Capture
) -> None:
    (note,) = Path("runs/multirun").rglob("1.json")
    note.write_text(left) if left else note.unlink()
    assert main(OBJECTIVE) == 0
    assert "finished before and not run again: 1 of them" in capsys.readouterr().err
    assert [outcome.state for outcome in outcomes()] == ["finished", "finished"]
    assert len(list(Path("runs/objective").iterdir())) == 2


def test_the_runs_of_a_sweep_with_a_name_are_named_apart(folder: Path, capsys: Capture) -> None:
    assert main([*OBJECTIVE, "name=mine"]) == 0
    assert sorted(path.name for path in Path("runs/objective").iterdir()) == [
        "mine-loss-exact",
        "mine-loss-sampled",
    ]
    assert Path("runs/multirun/objective/mine/jobs.yaml").exists()
    assert "job 1 of 2 (loss=exact): utility" in capsys.readouterr().err


def test_a_sweep_whose_reader_goes_away_is_run_to_its_end(
    folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """As behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        assert main(OBJECTIVE) == 0
    assert "jobs: 2/2" in capsys.readouterr().err
    assert [outcome.state for outcome in outcomes()] == ["finished", "finished"]


@pytest.mark.usefixtures("_signals_arrive")
def test_ctrl_c_between_jobs_that_joblib_runs_in_turn(
    folder: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """One job at a time needs no process of its own; a signal while one is judged does not let the
    next begin."""
    monkeypatch.setattr(run, "print_results", lambda *printed: os.kill(os.getpid(), signal.SIGINT))
    assert main([*OBJECTIVE, "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]) == 130
    assert [outcome.state for outcome in outcomes()] == ["stopped"]
    assert "at the same time" not in capsys.readouterr().err


def test_the_line_of_a_selectors_run(tmp_path: Path) -> None:
    rows = [
        {"policy": policy, "shots": shots, "accuracy": accuracy}
        for policy, shots, accuracy in [
            ("sft", 2, 0.5),
            ("grpo_live", 1, 0.25),
            ("grpo_live", 2, 0.75),
        ]
    ]
    results = {
        "system": "selector",
        "trained_shots": 2,
        "rows": rows,
        "variants": ["grpo_live", "shuffled"],
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert result_line(tmp_path) == "accuracy grpo_live 0.750"


# -- at the same time ------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.parametrize("launcher", ["joblib", "ray"])
def test_other_launchers_find_the_same(launcher: str, in_turn: tuple[str, str]) -> None:
    """joblib also runs jobs that fail, which leave the others alone."""
    words = [*OBJECTIVE, f"runs={launcher}", f"hydra/launcher={launcher}"]
    fails = launcher == "joblib"
    if fails:
        words += ["hydra.launcher.n_jobs=2", "budgets_ms=[0],null"]
    else:  # one process for both jobs, which is slow to start
        words += [
            "+hydra.launcher.ray.init.num_cpus=1",
            "+hydra.launcher.ray.init.include_dashboard=false",
        ]
    command = started(words, RAY_AUTH_MODE="disabled")
    printed, message = command.communicate()
    assert command.returncode == (2 if fails else 0), message
    assert numbers(launcher) == numbers("runs")
    assert "compare them: knobwise compare" in printed
    name = r"job {} of 4 \(loss={} budgets_ms=null\)" if fails else r"job {} of 2 \(loss={}\)"
    for number, loss in zip((2, 4) if fails else (1, 2), ("exact", "sampled"), strict=True):
        line = rf"^{name.format(number, loss)}: utility 0\.\d+ \[.*\], \d+ (s|min)"
        assert re.search(line, message, re.MULTILINE)
        (log,) = Path(launcher).glob(f"multirun/objective/*/{number}.log")
        assert "learned controller" in log.read_text()
    assert "learned controller" not in printed + message
    assert "Traceback" not in message
    if fails:
        assert [outcome.state for outcome in outcomes(launcher)] == ["failed", "finished"] * 2
        last = message.splitlines()[-1]
        assert last.startswith(
            "knobwise: job 1 of 4 (loss=exact budgets_ms=[0]) (and 1 more of them): budgets_ms"
        )


@pytest.mark.campaign
@pytest.mark.usefixtures("_signals_arrive")
def test_ctrl_c_ends_jobs_in_other_processes_and_the_same_command_goes_on(folder: Path) -> None:
    # seconds: a job looks every 0.3 s whether to stop
    long = ["optimiser.iterations=250", "optimiser.evaluate_every=50", "optimiser.patience=0"]
    sweep = started([*OBJECTIVE, *long, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
    begun = "objective/*/checkpoints/seed0/last.pt"
    message = stop_when(lambda: list(Path("runs").glob(begun)), sweep, signal.SIGINT, 300)
    states = [outcome.state for outcome in outcomes()]  # the second may not have begun
    assert states
    assert set(states) == {"stopped"}
    assert "0 of 2 jobs are finished" in message
    assert "Traceback" not in message
    assert len(list(Path("runs").glob(f"multirun/*/*/{UNFINISHED}"))) == 1
    assert main([*OBJECTIVE, *long]) == 0
    assert len(list(Path("runs/objective").iterdir())) == 2
    assert main([*OBJECTIVE, *long, "runs=whole"]) == 0
    assert numbers("runs") == numbers("whole")
