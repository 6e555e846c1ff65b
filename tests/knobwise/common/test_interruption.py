"""Ctrl-C and what schedulers send: real signals, many of them to real processes."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import commands
import pytest
import torch
from commands import COMMAND, VARIABLES, ctrl_c, iteration_of, same, visible, wait_for, words_of
from helpers import small_beams, small_table, trainer_on

from knobwise.__main__ import main
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import SelectorConfig
from knobwise.agents.selector.training import selector_trainer
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.settings import OptimiserConfig, StageConfig
from knobwise.common import interruption
from knobwise.common.interruption import held_back, status_of, stopped_by_signals
from knobwise.envs.bandit.settings import RewardConfig
from knobwise.losses.settings import LossConfig, SelectorLossConfig

pytestmark = pytest.mark.usefixtures("_signals_arrive")


def send(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def stopped(work):
    """What stops this work; the next signal is another wish."""
    with pytest.raises(KeyboardInterrupt) as stop:
        work()
    interruption._latest_s = -10.0
    return stop.value


# -- holding back ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_each_signal_stops_at_once_and_gives_its_status(number, status):
    handler = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as stop, stopped_by_signals():
        send(number)
    assert status_of(stop.value) == status
    assert signal.getsignal(number) is handler
    assert status_of(KeyboardInterrupt()) == 130  # without a signal


def test_what_was_told_to_be_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stopped_by_signals(), held_back() as held:
        send(signal.SIGHUP)
    assert held.number is None


@pytest.mark.parametrize(
    ("checks", "places"), [(True, ["sent"]), (False, ["sent", "end of the block"])]
)
def test_a_signal_is_held_back_to_where_it_may_stop_or_to_the_end(checks, places):
    passed = []

    def work():
        with held_back() as held:
            held.check()
            send(signal.SIGTERM)
            passed.append("sent")
            if checks:
                held.check()
            passed.append("end of the block")
        passed.append("after it")

    assert status_of(stopped(work)) == 143
    assert passed == places


def test_the_same_signal_twice_at_once_is_one(capsys, monkeypatch):
    # they are at once, however busy the machine is
    monkeypatch.setattr(interruption, "SAME_S", 60.0)
    monkeypatch.setattr(interruption, "_latest_s", -100.0)
    numbers = []

    def work():
        with held_back(say="stopping") as held:
            for _ in range(20):
                send()
            numbers.append(held.number)

    stopped(work)
    assert numbers == [signal.SIGINT]
    assert capsys.readouterr().err.split() == ["stopping"]


def test_a_second_signal_stops_at_once_but_not_what_is_undisturbed(monkeypatch):
    monkeypatch.setattr(interruption, "SAME_S", 0.0)
    passed = []

    def work():
        with held_back() as held:
            send()
            with held.undisturbed():
                send()
                passed.append("saved")
            send()
            passed.append("went on")

    stopped(work)
    assert passed == ["saved"]


def test_in_another_thread_nothing_changes():
    def work():
        with stopped_by_signals(), held_back() as held:
            return held.number

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- training --------------------------------------------------------------------------------------

SHORT = OptimiserConfig(
    4, pretrain_iterations=8, iterations=12, contexts=32, minibatch=16, epochs=2, evaluate_every=6
)


def controller(folder, how):
    """`how`: what the heads learn from, or the constraint of the budgets, and objective. A teacher takes
    8 iterations."""
    kind, objective = how.split()
    taught = {"teacher": True, "experts": ("ridge",), "drift": 0.2} if kind != "rewards" else {}
    return trainer_on(
        small_table(80, holes=0.2),
        PolicyConfig(hidden=16, teacher_hidden=8, fold_networks=3, **taught),
        "mean" if kind == "mean" else "deadline",
        folder=folder,
        loss=LossConfig(objective=objective, kl_to_ref_coeff=0.01, kl_band=(0.01, 0.1)),
        optimiser=SHORT,
        reward=RewardConfig("utility"),
    )


def selector(folder, how):
    """`how`: stage, and which epoch is kept."""
    (table, scorer), (stage, keep) = small_beams(), how.split()
    torch.manual_seed(0)
    config = SelectorConfig(width=16, heads=2, dropout=0.3)
    band = (0.0, 0.001)
    return selector_trainer(
        "grpo" if stage == "live" else stage,
        table,
        table.split(0.8, 0.1),
        Selector.fitted(config, table.queries, table.candidates),
        scorer=scorer,
        live=stage == "live",
        folder=folder,
        loss=SelectorLossConfig(kl_band=band, temperature_band=band, curriculum=0.4),
        config=StageConfig(epochs=3, lr=3e-3, queries=8, keep=keep),
    )


def press(trainer, iteration, times=1):
    """Have signals sent to this process in the middle of an iteration."""
    train_step = trainer._train_step

    def pressed(stage, stream):
        if trainer.state.iteration == iteration:
            for _ in range(times):
                send()
        return train_step(stage, stream)

    trainer._train_step = pressed


@pytest.mark.parametrize(
    ("make", "how", "stops", "crash"),
    [
        pytest.param(controller, "teacher exact", [2, 5, 9, 20], 25, marks=pytest.mark.campaign),
        (controller, "teacher sampled", [13], 19),
        pytest.param(controller, "rewards sampled", [7, 12], 19, marks=pytest.mark.campaign),
        (controller, "mean exact", [], 2),
        pytest.param(controller, "mean sampled", [], 15, marks=pytest.mark.campaign),
        pytest.param(selector, "sft best", [1, 4], 10, marks=pytest.mark.campaign),
        (selector, "rce best", [2], 5),
        pytest.param(selector, "rce last", [], 9, marks=pytest.mark.campaign),
        (selector, "grpo best", [3], 9),
        pytest.param(selector, "live best_kl", [5], 11, marks=pytest.mark.campaign),
    ],
)
def test_what_was_stopped_ends_bit_for_bit_like_any(tmp_path, make, how, stops, crash):
    """Ctrl-C saves the iteration that it comes in; a crash loses those since the last
    evaluation."""
    make(tmp_path / "whole", how).run()

    def resumed():
        trainer = make(tmp_path / "stopped", how)
        trainer.resume(tmp_path / "stopped" / "last.pt")
        return trainer

    for stop in stops:
        trainer = resumed()
        press(trainer, stop)
        (note,) = stopped(trainer.run).__notes__
        load_checkpoint(tmp_path / "stopped" / "best.pt")
        assert f"holds iteration {stop + 1} of {trainer.total}" in note
        assert resumed().state.iteration == stop + 1  # nothing of what was done is lost
    crashing = ctrl_c(lambda trainer: trainer.state.iteration == crash, EOFError())
    with crashing, pytest.raises(EOFError):
        resumed().run()
    trainer = resumed()
    every = trainer.settings.evaluate_every
    assert trainer.state.iteration == crash // every * every
    trainer.run()
    whole, again = (
        {path.name: torch.load(path, weights_only=True) for path in (tmp_path / run).iterdir()}
        for run in ("whole", "stopped")
    )
    for end in (*whole.values(), *again.values()):
        end["extra"].pop("policy", None)  # named after the folder
    assert same(whole, again)


def test_a_second_ctrl_c_stops_in_the_middle_with_what_was_saved_before(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "SAME_S", 0.0)
    trainer = controller(tmp_path, "rewards sampled")
    press(trainer, 9, times=2)
    # the end of the warm-up
    assert "holds iteration 8 of 20" in stopped(trainer.run).__notes__[0]
    assert iteration_of(tmp_path / "last.pt") == 8


def test_ctrl_c_at_the_last_iteration_leaves_a_finished_training(tmp_path):
    trainer = controller(tmp_path, "rewards sampled")
    press(trainer, 19)
    assert "holds iteration 20 of 20" in stopped(trainer.run).__notes__[0]
    again = controller(tmp_path, "rewards sampled")
    assert again.resume(tmp_path / "last.pt")
    assert again.state.finished


# -- the command -----------------------------------------------------------------------------------

TRAIN = words_of(
    ["train", *commands.TABLE],
    """policy=utility seeds=[0,1] policy.hidden=16 baselines=false tracking=disabled name=x
    optimiser.teacher_iterations=10 optimiser.pretrain_iterations=20 optimiser.iterations=180
    optimiser.contexts=64 optimiser.evaluate_every=25 optimiser.patience=0""",
)
BEAMS = words_of(
    commands.REPLAY,
    """variants.shuffled_recorded=null variants.grpo_recorded.epochs=1 sft.epochs=200
    seeds=[0,1,2] jobs=2 name=x""",
)
TERMINAL = {"TERM": "xterm", "COLUMNS": "120"}
SFT = [Path(f"runs/selector_replay/x/checkpoints/seed{seed}/sft/last.pt") for seed in (0, 1)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands.write_table(90, holes=0.3)
    small_beams(60)[0].save("b.safetensors")
    return tmp_path


def test_a_run_stopped_by_a_scheduler_says_what_is_saved_and_how_to_go_on(folder):
    """Stopped in the middle of the second seed; all that it prints is true. Ctrl-C is pressed in a
    terminal below."""
    kept = Path("runs/controller/x/checkpoints/seed1")
    process = commands.Command(TRAIN)
    message = commands.stop_when(
        lambda: iteration_of(kept / "last.pt") >= 25, process, signal.SIGTERM
    )
    assert "Traceback" not in message
    (note,) = re.findall(rf"{kept}/last\.pt holds iteration (\d+) of 220", message)
    assert 25 <= iteration_of(kept / "last.pt") == int(note) < 220
    assert [path.name for path in Path("runs").rglob(".*")] == [".unfinished"]
    (command,) = re.findall(r"repeat the command to resume:\s+(.+)", message)
    words = shlex.split(command)
    assert words[0] == "knobwise"
    assert main(words[1:]) == 0
    assert [path.name for path in Path("runs/controller").iterdir()] == ["x"]


def read_to_end(terminal, output):
    """What is written until all who could write have gone."""
    with suppress(OSError):
        while part := os.read(terminal, 65536):
            output += part


@pytest.mark.campaign
@commands.in_proc
def test_in_a_terminal_there_are_bars_and_ctrl_c_stops_all_processes(folder):
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(sys.executable, [*COMMAND, *BEAMS], {**os.environ, **VARIABLES, **TERMINAL})
    output = bytearray()
    reader = threading.Thread(target=read_to_end, args=(terminal, output), daemon=True)
    reader.start()
    # the processes have no bars of their own
    bar = re.compile("seeds +[━╸╺]+ +0/3 +time left unknown")

    def begun():
        started = all(iteration_of(path) >= 10 for path in SFT)
        return started and bar.search(visible(output)) is not None

    wait_for(lambda: begun() or not commands.alive(process))
    children = commands.children_of(process)
    os.write(terminal, b"\x03")  # the key: the terminal makes a signal of it, for every process
    reader.join(120)
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    message = visible(output)
    assert os.waitstatus_to_exitcode(status) == 130, message
    assert "Traceback" not in message
    # no process is left, and what waited was not begun
    assert len(children) >= 2
    wait_for(lambda: not any(map(commands.alive, children)), 10)
    assert not Path("runs/selector_replay/x/checkpoints/seed2").exists()
    assert bar.search(message), message


@pytest.mark.parametrize("gone", ["closed", "unread"])
def test_a_stderr_that_is_gone_does_not_stop_training(folder, gone):
    process = commands.Command([*TRAIN, "optimiser.iterations=2", "seeds=[0]"], gone)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert Path("runs/controller/x/report.html").exists()


CLOSED = """
import os, sys
from knobwise.__main__ import main
main(["--version"])
sys.stderr.flush()
print([os.get_inheritable(n) for n in (0, 2)], open("/dev/zero").fileno() > 2)
"""


def test_closed_streams_are_opened_for_libraries_and_other_processes():
    command = ["bash", "-c", '"$@" 0<&- 2>&-', "", sys.executable, "-c", CLOSED]
    printed = subprocess.check_output(command, text=True)
    assert printed.splitlines()[1:] == ["[True, True] True"]


WORK = """
import os, time
from knobwise.common.interruption import end_with
end_with(os.getppid() + {further})
time.sleep(2)
"""


@pytest.mark.parametrize(("further", "status"), [(0, 0), (1, 1)])
def test_work_ends_where_its_parent_is_not_the_process_that_began_it(further, status):
    words = [sys.executable, "-c", WORK.format(further=further)]
    assert subprocess.run(words, timeout=50).returncode == status
