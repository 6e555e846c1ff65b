"""Trainings that die between row, checkpoint and sink, and go on: at the end every number is once in
the journal, in TensorBoard's event files and in a W&B run."""

import csv
import multiprocessing
import os
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import wandb
from helpers import small_table, trainer_on
from wandb_stub import offline_runs

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.trainer import Trainer
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.tracking.histograms import part_histograms
from knobwise.experiments.tracking.metrics_file import MetricsFile
from knobwise.experiments.tracking.tracker import THROUGHPUT, Tracker
from knobwise.experiments.tracking.wandb_run import WandbRun
from knobwise.experiments.train.run import run_logged, tracker_of

KILLED = 9
TABLE = small_table(40)
OPTIMISER = OptimiserConfig(
    pretrain_iterations=2, iterations=4, contexts=16, minibatch=16, evaluate_every=2
)
"""Rows: Val 0, Train 0, Val 2, Train 2, Val 4, Train 4, Val 6. Each Val has a histogram, each Train
a speed, and after each Val come one or two checkpoints."""


def training(folder):
    trainer = trainer_on(TABLE, PolicyConfig(hidden=8), folder=folder, optimiser=OPTIMISER)
    validate = trainer.validate

    def with_histogram(logged):
        draws = torch.full([trainer.state.iteration + 1], 0.1)
        return validate(logged)._replace(distributions={"Draws": draws})

    trainer.validate = with_histogram
    return trainer


def work(folder, death=None):
    """Train to the end, as a run does, and log the test scores; or die on the way."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    os.dup2(os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    config = TrainRun(tracking=TrackingSettings(mode="offline"))
    if death is not None:
        death()
    trainer = training(folder / "checkpoints")
    trainer.resume(folder / "checkpoints/last.pt")
    run_logged(trainer, config, folder, TABLE)
    with tracker_of(config, folder, TABLE, "train", trainer.seed) as log:
        log.log_scores({"Test/Utility": 0.5}, kept=False)


def dies(when, owner, name, call):
    """Have this process die before or after the `call`-th call of a function."""
    real = getattr(owner, name)
    calls = Counter()

    def deadly(*arguments, **settings):
        calls[name] += 1
        if when == "before" and calls[name] == call:
            os._exit(KILLED)
        result = real(*arguments, **settings)
        if when == "after" and calls[name] == call:
            os._exit(KILLED)
        return result

    patch.object(owner, name, deadly).start()


def without_wandb():
    """Have this process die before W&B starts, after what was there of it is removed."""
    dies("before", wandb, "init", 1)


def half_a_line(folder):
    """What a process leaves that dies while it writes."""
    for name in ("metrics", "histograms", "speed"):
        with (folder / f"{name}.csv").open("a") as file:
            file.write("0,4,0.12")


def ends(folder, death=None):
    """Work in a process of its own; its exit status."""
    process = multiprocessing.get_context("forkserver").Process(target=work, args=(folder, death))
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert ends(folder) == 0
    return folder


def read(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [{key: float(value) for key, value in row.items() if key != "seed"} for row in rows]


def numbers(folder):
    """(name, step) → the number that the journal has; the speed is that of this run."""
    found = {}
    for name in ("metrics", "histograms", "speed"):
        for row in read(folder, name):
            step = int(row.pop("step"))
            for key, value in row.items():
                assert (key, step) not in found
                found[key, step] = value
    return found


def in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard/seed0"), {"scalars": 0, "histograms": 0})
    tags = reader.Reload().Tags()
    scalars = [(name, e.step, e.value) for name in tags["scalars"] for e in reader.Scalars(name)]
    names = tags["histograms"]
    counts = [
        (name, e.step, e.histogram_value.num) for name in names for e in reader.Histograms(name)
    ]
    return scalars + counts


def in_wandb(folder):
    (run,) = offline_runs(folder)
    assert run.exit_code == 0
    assert run.summary["Test/Utility"] == 0.5
    found = []
    for row in run.history:
        step = row.pop("step")
        for name, value in row.items():
            if name.endswith(".values"):
                found.append((name.removesuffix(".values"), step, sum(value)))
            elif "." not in name:
                found.append((name, step, value))
    return found


row = partial(partial, dies, "after", MetricsFile, "append")
to_tensorboard = partial(partial, dies, "after", Tracker, "_to_tensorboard")
to_wandb = partial(partial, dies, "after", WandbRun, "log")
checkpoint = partial(partial, dies, "after", Loaded, "save")
before_checkpoint = partial(partial, dies, "before", Loaded, "save")
CASES = {
    "after the first row, before its histogram": [row(1)],
    "after row and histogram, before the sinks": [row(2)],
    "after the first sinks, before a checkpoint": [before_checkpoint(1)],
    "between two checkpoints": [checkpoint(1)],
    "after a checkpoint, before the next row": [checkpoint(2)],
    "after a row, before its speed": [row(6)],
    "between the sinks": [to_tensorboard(3)],
    "after the sinks, before the next row": [to_wandb(4)],
    "after two rows, before their checkpoint": [before_checkpoint(5)],
    "in the middle of a row": [row(6), half_a_line],
    "after the last checkpoint, before the sinks are closed": [
        partial(dies, "after", Trainer, "run", 1)
    ],
    "while what was logged is logged again": [to_wandb(5), to_tensorboard(2), to_wandb(2)],
    "before W&B starts again": [to_wandb(5), without_wandb],
    "around the test scores": [
        partial(dies, "before", Tracker, "log_scores", 1),
        partial(dies, "after", Tracker, "log_scores", 1),
    ],
    "again and again": [row(1), checkpoint(2), to_wandb(3), row(3), before_checkpoint(1)],
}


OFTEN = {
    "after the first row, before its histogram",
    "between two checkpoints",
    "between the sinks",
    "in the middle of a row",
    "around the test scores",
    "again and again",
}
"""The others are in the campaign."""


@pytest.mark.parametrize(
    "deaths",
    [
        pytest.param(deaths, id=name, marks=() if name in OFTEN else pytest.mark.campaign)
        for name, deaths in CASES.items()
    ],
)
def test_every_number_is_once_everywhere(unbroken, tmp_path, deaths):
    for death in deaths:
        if death is half_a_line:
            death(tmp_path)
        else:
            assert ends(tmp_path, death) == KILLED
    assert ends(tmp_path) == 0
    for name in ("metrics.csv", "histograms.csv"):
        assert (tmp_path / name).read_bytes() == (unbroken / name).read_bytes()
    written = numbers(tmp_path)
    assert written.keys() == numbers(unbroken).keys()
    wanted, histograms = part_histograms(
        {f"{step} {name}": v for (name, step), v in written.items()}
    )
    wanted |= {name: sum(counts) for name, counts in histograms.items()}
    assert f"4 {THROUGHPUT}" in wanted
    for found in (in_tensorboard(tmp_path), in_wandb(tmp_path)):
        assert len(found) == len(wanted)
        # event files are float32
        values = {f"{step} {name}": value for name, step, value in found}
        assert values == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("lost", ["metrics.csv", "the last rows"])
def test_rows_that_are_lost_are_told_and_the_training_goes_on(tmp_path, unbroken, lost):
    """They are missing then; what follows is there once, also after one more death."""
    assert ends(tmp_path, before_checkpoint(5)) == KILLED
    counted = load_checkpoint(tmp_path / "checkpoints/last.pt").extra["training"]["rows"]
    assert counted > 1
    path = tmp_path / "metrics.csv"
    if lost == "the last rows":
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    else:
        path.unlink()
    assert ends(tmp_path, before_checkpoint(1)) == KILLED
    assert ends(tmp_path) == 0
    said = (tmp_path / "said.txt").read_text().splitlines()
    lines = [line for line in said if "missing" in line]
    assert len(lines) == 2
    assert all(line.startswith(str(path)) for line in lines)
    whole = read(unbroken, "metrics")
    left = read(tmp_path, "metrics")
    assert left == [*whole[: 1 if lost == "the last rows" else 0], *whole[counted:]]
    for name in ("best.pt", "last.pt"):
        states = [
            torch.load(run / "checkpoints" / name, weights_only=True)
            for run in (tmp_path, unbroken)
        ]
        first, second = (state["controller"]["state"] for state in states)
        assert all(torch.equal(first[key], second[key]) for key in first)
    found = in_wandb(tmp_path)
    assert len(found) == len({(name, step) for name, step, _ in found})
