"""The command line in tests: data to train on, mistakes, Ctrl-C, and commands in processes of their
own."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import small_table

import knobwise.__main__
from knobwise.__main__ import main
from knobwise.agents import load_checkpoint
from knobwise.agents.training.trainer import Trainer
from knobwise.common.progress import say
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import write_long_table
from knobwise.experiments.command_line.compose import run_hydra
from knobwise.experiments.command_line.registry import schema_of
from knobwise.experiments.train import selector

COMMAND = [sys.executable, "-m", "knobwise"]


def words_of(*parts):
    """The words of a command: of lines as they are typed, and of lists."""
    words = []
    for part in parts:
        words += part.split() if isinstance(part, str) else part
    return words


def launch(*parts):
    """Run a command, whose words are those of `words_of`, in this process; it succeeds."""
    assert main(words_of(*parts)) == 0


TABLE = words_of("profile=table profile.path=t.parquet profile.features=f.npz")
"""Trains on what `write_table` writes."""
SIMULATED = words_of("""
    profile=simulated profile.datasets=[okvqa] profile.grid='27' profile.samples=40
    profile.image_width=4 profile.language_width=4
""")
"""A small table without a file."""
UNTAUGHT = words_of("""
    optimiser.pretrain_iterations=4 optimiser.iterations=8
    optimiser.contexts=32 optimiser.evaluate_every=4 policy.hidden=16 tracking=disabled
""")
"""Is quick, for heads without a teacher."""
OPTIMISER = words_of("optimiser.teacher_iterations=4", UNTAUGHT)
"""Is quick."""
BEAMS = words_of("""
    beams.path=b.safetensors beams.train=0.6 beams.validation=0.2 selector.width=16
    selector.heads=2 sft.queries=8 rce.queries=8 grpo.queries=8 rce.epochs=1 seeds=[0]
    tracking=disabled
""")
"""Trains a selector quickly on `b.safetensors`."""
REPLAY = ["train", "experiment=selector_replay", *BEAMS]
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # W&B would list every installed package, for a third of a second a run
    "WANDB__SAVE_REQUIREMENTS": "false",
}
in_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks processes up in /proc"
)


def read_json(path):
    return json.loads(Path(path).read_text())


def write_table(samples=60, seed=0, holes=0.0, prefix=""):
    """Write a long table and its features into this folder."""
    table = small_table(samples, seed, holes)
    write_long_table(table, f"{prefix}t.parquet")
    write_features(table, f"{prefix}f.npz")


def jobs_of(words):
    """The settings of every job of a sweep with these words."""
    jobs = []
    run_hydra(schema_of("train", words), ["-m", *words], lambda job, *_: jobs.append(job))
    return jobs


def mistake(words, capsys, begun=""):
    """The one line that a command prints about a mistake; `begun` begins the line that it printed
    before, if it had got so far."""
    capsys.readouterr()
    # on a busy machine even short work takes long enough for a line of progress
    with patch("knobwise.common.progress.say") as silent:
        assert main(words) == 2
    # a module that was imported meanwhile would stay silent in all tests to come
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("say") is silent:
            module.say = say
    printed = capsys.readouterr()
    lines = printed.err.removesuffix("\n").split("\n")
    # what is noted of a server begins with its address
    lines = [line for line in lines if not line.startswith("http://")]
    (line,) = [line for line in lines if "Loading weights" not in line]
    assert line.startswith("knobwise: ")
    assert printed.out.startswith(begun)
    assert printed.out.count("\n") == bool(begun)
    return line


def refused(words, capsys):
    """The one line that a command prints about a mistake; nothing below this folder changes."""
    before = files_here()
    line = mistake(words, capsys)
    assert files_here() == before
    return line


def files_here():
    """What is below this folder, without Python's bytecode."""
    return [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]


@contextmanager
def ctrl_c(when, error=None):
    """A block in which Ctrl-C is pressed, or an error raised, in each iteration of a `Trainer` for
    which this holds."""
    step = Trainer._train_step

    def pressed(self, *arguments):
        if when(self):
            raise error or KeyboardInterrupt
        return step(self, *arguments)

    with patch.object(Trainer, "_train_step", pressed):
        yield


def stopped_and_resumed(make, folder, stop):
    """Two trainings at their end: one that was never stopped, and one that Ctrl-C stopped in this
    iteration and that went on, in the folders `whole` and `stopped`."""
    whole = make(folder / "whole")
    whole.run()
    with ctrl_c(lambda trainer: trainer.state.iteration == stop), pytest.raises(KeyboardInterrupt):
        make(folder / "stopped").run()
    again = make(folder / "stopped")
    assert again.resume(folder / "stopped/last.pt")
    assert 0 < again.state.iteration <= stop
    again.run()
    return whole, again


def ctrl_c_at(stage, iteration):
    """A block in which Ctrl-C is pressed in this iteration, which is of this stage."""
    return ctrl_c(
        lambda trainer: (trainer.stage.name, trainer.state.iteration) == (stage, iteration)
    )


@contextmanager
def selector_trainers():
    """A block, and the trainers of a selector's stages that runs make in it, by their folders'
    names."""
    made = {}
    make = selector.selector_trainer

    def noted(*arguments, **settings):
        trainer = make(*arguments, **settings)
        if trainer.folder is not None:  # else its settings are only checked
            made[trainer.folder.name] = trainer
        return trainer

    with patch.object(selector, "selector_trainer", noted):
        yield made


def ctrl_c_in_report():
    """A block in which Ctrl-C is pressed while a run writes its report."""
    return patch("knobwise.experiments.train.finish.write_report", side_effect=KeyboardInterrupt)


def same(first, second):
    """Whether two structures of tensors and plain values are equal to the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    # NaN is not equal to itself
    return bool(first == second) or (first != first and second != second)


# -- in other processes ----------------------------------------------------------------------------


def started(words, **variables):
    """A command at work in a new interpreter, which joblib and Ray start their processes from."""
    environment = {**os.environ, **VARIABLES, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *words], env=environment, text=True, **pipes)


class Command:
    """A command at work, in a process forked from one that has imported everything, which others
    need seconds for. Its stderr may be `gone`: "closed", or "unread" by anybody."""

    def __init__(self, words, gone=""):
        self.printed = [Path(tempfile.mkstemp(prefix=name)[1]) for name in ("out-", "err-")]
        environment = {**os.environ, **VARIABLES}
        context = multiprocessing.get_context("forkserver")
        arguments = words, os.getcwd(), environment, self.printed, gone
        self.process = context.Process(target=_work, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self):
        """None while it is at work; −n if signal n ended it."""
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """Wait for its end; what it wrote to stdout and stderr."""
        self.process.join(timeout)
        assert self.returncode is not None, f"at work after {timeout} s"
        out, err = (path.read_text() for path in self.printed)
        for path in self.printed:
            path.unlink()
        return out, err


def _work(words, folder, environment, printed, gone):
    """`python -m knobwise …` in this process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    if gone == "closed":
        os.close(2)
        sys.stderr = None  # as Python begins without it
    elif gone == "unread":
        reader, writer = os.pipe()
        os.dup2(writer, 2)
        os.close(reader)
        sys.stderr = os.fdopen(2, "w", buffering=1)  # the one before was a file
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["__main__"], sys.argv = knobwise.__main__, [str(knobwise.__main__.__file__), *words]
    sys.exit(main())


def wait_for(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def stop_when(condition, process, number=signal.SIGKILL, seconds=120):
    """Send a command this signal as soon as this holds; what it wrote to stderr."""
    wait_for(lambda: condition() or process.poll() is not None, seconds)
    process.send_signal(number)
    _, message = process.communicate(timeout=seconds)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), message
    return message


def visible(output):
    """What a terminal was given, without control characters, each state of a bar a line."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode(errors="ignore")).replace("\r", "\n")


def iteration_of(last):
    """Where the training of a `last.pt` stands; −1 before there is one."""
    return int(load_checkpoint(last).extra["training"]["iteration"]) if last.exists() else -1


def alive(process):
    """Whether a process is still at work; a dead one that nobody has asked after is not."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def children_of(process):
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
