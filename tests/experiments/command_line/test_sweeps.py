"""Sweeps: the jobs of every experiment's file, what becomes of jobs that finish, fail or are
stopped, and all three launchers."""

import os
import shutil
import signal
import sys
from contextlib import chdir
from operator import attrgetter
from pathlib import Path

import pytest
from commands import (
    TABLE,
    UNTAUGHT,
    ctrl_c,
    jobs_of,
    launch,
    mistake,
    read_json,
    refused,
    started,
    stop_when,
    words_of,
    write_table,
)

from knobwise.__main__ import main
from knobwise.common.files import is_damaged
from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.flags import refuse_flags
from knobwise.experiments.command_line.registry import (
    names_of_choices,
    question_of_experiment,
    schema_of,
)

SWEPT = {
    "group_size": ("loss.group_size", [5, 8, 16, 64]),
    "objective": ("loss.objective", ["exact", "sampled"]),
    "advantages": ("loss.advantage", ["zscore", "centred", "rank", "unnormalised"]),
    "heads": ("policy.teacher", [True, False]),
    "reward_coefficients": ("reward.gamma", [0, 1, 10, 0, 1, 10]),
    "miss": ("reward.miss", [0, 0.2, 0.5]),
    "kl": ("loss.kl_to_ref_coeff", [0, 0.1, 0.3, 1]),
    "clip": ("loss.clip_epsilon", [0.1, 0.2, 0.4]),
    "ppo": ("loss.objective", ["sampled", "ppo"]),
    "leave_one_out": ("split.leave_out", ["text_vqa", "coco_vqa", "okvqa"]),
}
"""The setting that the file of an experiment sweeps, and its value in each job."""
QUICK = words_of(UNTAUGHT, "policy.fold_networks=2 seeds=[0] baselines=false own_cost=false")
OBJECTIVE = words_of("train -m experiment=objective", TABLE, QUICK)


@pytest.fixture
def folder(home):
    """An empty folder with a long table and its features."""
    write_table()
    return home


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A folder in which the sweep over objectives ran."""
    place = tmp_path_factory.mktemp("swept")
    with chdir(place):
        write_table()
        launch(OBJECTIVE)
    return place


@pytest.fixture
def whole(swept, folder):
    """A copy of that folder."""
    shutil.copytree(swept, folder, symlinks=True, dirs_exist_ok=True)
    return folder


def numbers(runs):
    """What jobs found, by objective, without what differs from time to time."""
    found = {}
    for path in Path(runs).glob("objective/*/results.json"):
        results = read_json(path)
        for row in results["rows"]:
            row.pop("decision_us_p50")
        objective = "exact" if "loss=exact" in results["command"] else "sampled"
        metrics = path.with_name("metrics.csv").read_text()
        found[objective] = results["rows"], results["validation_utility"], metrics
    return found


def runs_of(experiment):
    """The finished runs of an experiment, and when they were written."""
    paths = Path("runs", experiment).glob("*/results.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in paths}


# -- which jobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names_of_choices("experiment"))
def test_every_experiment_file_is_understood_with_all_its_jobs(name, folder):
    words = [f"experiment={name}"]
    if name == "selector_replay":
        words.append("beams.path=beams.json")
    single = read_settings(schema_of("train", words), words)
    assert single.experiment == name
    assert "?" in question_of_experiment(name)
    if name in SWEPT:
        jobs = jobs_of(words)
        key, values = SWEPT[name]
        assert list(map(attrgetter(key), jobs)) == values
        assert all(jobs.count(job) == 1 for job in jobs)
        assert single in jobs


def test_the_command_line_holds_where_the_file_says_otherwise(folder):
    jobs = jobs_of(words_of("experiment=group_size loss.group_size=4 policy.hidden=8,16"))
    assert [(job.loss.group_size, job.policy.hidden) for job in jobs] == [(4, 8), (4, 16)]


@pytest.mark.parametrize(
    "word", ["polici.hidden=8,16", "policy.hidden=8,wide", "hydra/launcher=slurm", "policy=a,b"]
)
def test_a_mistake_in_any_job_is_a_line_before_the_first_runs(word, folder, capsys):
    assert word.split("=")[0] in mistake([*OBJECTIVE, word], capsys)
    assert not runs_of("objective")


# -- in turn ---------------------------------------------------------------------------------------


def test_finished_jobs_are_named_and_not_run_again_unless_data_change(whole, capsys):
    before = runs_of("objective")
    assert before.keys() == {"loss-exact", "loss-sampled"}  # after what the sweep varies
    # the order of words does not matter
    launch(OBJECTIVE[:2], OBJECTIVE[:1:-1])
    assert capsys.readouterr().err.count("already finished") == 2
    assert runs_of("objective") == before
    write_table(seed=1)
    launch(OBJECTIVE, "loss=exact")
    assert "already finished" not in capsys.readouterr().err
    assert len(runs_of("objective")) == 3


def test_a_damaged_checkpoint_of_a_finished_job_is_made_again(whole, swept, capsys):
    path = Path("runs/objective/loss-exact/checkpoints/seed0/last.pt")
    path.write_bytes(path.read_bytes()[:1000])
    launch(OBJECTIVE)
    printed = capsys.readouterr().err
    assert f"{path}: is damaged" in printed
    assert "goes on from iteration" in printed
    assert printed.count("already finished") == 1
    assert not is_damaged(path)
    assert runs_of("objective").keys() == {"loss-exact", "loss-sampled"}
    assert numbers("runs") == numbers(swept / "runs")


def test_a_sweep_inside_a_job_of_a_wandb_agent_is_refused(folder, monkeypatch, capsys):
    """Its runs would all log their results under the id that the agent names."""
    words = words_of("train -m", TABLE, QUICK, "policy.hidden=8,16")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    refuse_flags("train", words)
    monkeypatch.setenv("WANDB_RUN_ID", "job1")
    assert "-m: " in refused(words, capsys)
    # a single run is what the agent expects
    refuse_flags("train", words_of(TABLE, QUICK))


def test_a_job_that_fails_does_not_keep_the_others_from_running(folder, capsys):
    # a budget of 0 ms shows when the run begins
    assert main(words_of("train -m", TABLE, QUICK, "budgets_ms=[0],[2]")) == 2
    printed = capsys.readouterr().err
    assert "budgets_ms" in printed.splitlines()[-1]
    assert "Traceback" not in printed
    assert len(runs_of("controller")) == 1


def test_an_error_of_the_program_is_raised_when_the_others_are_done(folder):
    error = RuntimeError("wrong")
    first = ctrl_c(lambda trainer: trainer.setup.loss.objective == "exact", error)
    with first, pytest.raises(RuntimeError, match="wrong"):
        main(OBJECTIVE)
    assert len(runs_of("objective")) == 1


def test_an_interrupted_sweep_resumes_its_job_and_ends_like_the_unbroken(folder, swept, capsys):
    second = ctrl_c(
        lambda trainer: (trainer.setup.loss.objective, trainer.state.iteration) == ("sampled", 9)
    )
    with second:
        assert main([*OBJECTIVE, "name=mine"]) == 130
    first = runs_of("objective")
    launch(OBJECTIVE, "name=mine")
    assert capsys.readouterr().err.count("already finished") == 1
    runs = runs_of("objective")
    assert runs.keys() == {"mine", "mine-2"}
    assert first.items() <= runs.items()
    assert numbers("runs") == numbers(swept / "runs")


def test_a_sweep_whose_reader_goes_away_is_run_to_its_end(folder, monkeypatch):
    """As behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        launch(OBJECTIVE)
    assert len(runs_of("objective")) == 2


# -- at the same time ------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("joblib", "hydra.launcher.n_jobs=2"),
        # one process for both jobs, which is slow to start
        ("ray", "+hydra.launcher.ray.init.num_cpus=1 +hydra.launcher.ray.init.include_dashboard=false"),
    ],
)  # fmt: skip
def test_other_launchers_find_the_same(launcher, words, whole):
    words = words_of(OBJECTIVE, f"runs={launcher} hydra/launcher={launcher}", words)
    command = started(words, RAY_AUTH_MODE="disabled")
    _, message = command.communicate()
    assert command.returncode == 0, message
    assert numbers(launcher) == numbers("runs")


@pytest.mark.campaign
@pytest.mark.usefixtures("_signals_arrive")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_jobs_in_other_processes_end_with_the_sweep_and_the_same_command_goes_on(number, folder):
    long = "optimiser.iterations=250 optimiser.evaluate_every=50 optimiser.patience=0"
    # two jobs for three workers, which all write to this pipe until they end: so does the idle one
    workers = "hydra/launcher=joblib hydra.launcher.n_jobs=3"
    sweep = started(words_of(OBJECTIVE, long, workers))
    begun = "objective/*/checkpoints/seed0/last.pt"
    stop_when(lambda: list(Path("runs").glob(begun)), sweep, number, 100)
    launch(OBJECTIVE, long)
    assert len(runs_of("objective")) == 2
    launch(OBJECTIVE, long, "runs=whole")
    assert numbers("runs") == numbers("whole")
