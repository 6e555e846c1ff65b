"""Fingerprints of small runs, to tell whether a change of the code changes any bit of a training.

Every setting is run twice: through, and stopped several times and resumed. Of each run the agents
that were kept, the state of the random generator at the end and `metrics.csv` are hashed. Both runs
must agree. Hashes differ between processors, so two versions of the code are compared on one
machine:

    PYTHONPATH=. python tests/fingerprints.py before.json     # the old version
    PYTHONPATH=. python tests/fingerprints.py after.json      # the new one
    diff before.json after.json

Names of settings after the file's name run only these.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from commands import BEAMS, TABLE, UNTAUGHT, VARIABLES, words_of, write_table
from helpers import few_demonstrations, small_beams

from knobwise.__main__ import main
from knobwise.common import interruption
from knobwise.experiments.tracking.tracker import Tracker
from knobwise.experiments.train.controller import ControllerExperiment
from knobwise.experiments.train.selector import SelectorExperiment

SHARED = words_of("seeds=[0] name=x tracking.tensorboard=false")
UNTAUGHT_CONTROLLER = words_of(
    "train experiment=lean baselines=false", TABLE, UNTAUGHT, SHARED, "optimiser.patience=0"
)
CONTROLLER = words_of(UNTAUGHT_CONTROLLER, "optimiser.teacher_iterations=4")
WITH_TEACHER = words_of(CONTROLLER, "policy.experts=[ridge,knn] policy.fold_networks=2")
FREE = words_of(
    UNTAUGHT_CONTROLLER, "policy=independent loss.entropy_coeff=0.01 optimiser.epochs=2"
)
REPLAYED = words_of(
    "train experiment=selector_replay",
    BEAMS,
    SHARED,
    "variants.grpo_recorded=null variants.shuffled_recorded=null",
)
BUILTIN = words_of(
    """
    train experiment=selector selector.width=16 selector.heads=2 sft.epochs=1 rce.epochs=1
    sft.queries=16 rce.queries=16 grpo.queries=16 grpo.epochs=2 judged_shots=[2] tracking=disabled
    """,
    SHARED,
    "variants.grpo_recorded=null variants.grpo_rounds=null variants.grpo_live=null",
    "variants.shuffled_recorded=null variants.shuffled_live=null variants.hidden_live=null",
)
SELECTOR_SEEDS = words_of(
    "train experiment=selector_seeds beams=files", BEAMS, SHARED, "sft.epochs=2"
)
SETTINGS = {
    "auto": WITH_TEACHER,
    "auto, exact": [*WITH_TEACHER, "loss=exact"],
    "utility": words_of(CONTROLLER, "policy=utility policy.fold_networks=2"),
    "grpo": [
        *UNTAUGHT_CONTROLLER,
        "policy=grpo",
        "policy.fold_networks=2",
        "optimiser.pretrain_iterations=0",
    ],
    "independent": FREE,
    "exact": [*FREE, "loss=exact"],
    "ppo": [*FREE, "loss=ppo"],
    "ppo, z-scores": [*FREE, "loss=ppo", "loss.advantage=zscore"],
    "kl_band": [*FREE, "loss.kl_band=[0.01,0.1]", "optimiser.evaluate_every=3"],
    "drift": [*FREE, "policy.drift=0.3"],
    "dropout": [*FREE, "policy.dropout=0.2", "loss.advantage=zscore"],
    "augment": [*WITH_TEACHER, "policy.augment=0.1"],
    "shaped": [*FREE, "reward=shaped", "budget=relative", "balance.by=configuration"],
    "mean budget": [*WITH_TEACHER, "budget=mean"],
    "folds": [*WITH_TEACHER, "split.folds=2"],
    "init_from": [
        *FREE,
        "init_from=start/lean/x/checkpoints/seed0/best.pt",
        "optimiser.pretrain_iterations=0",
    ],
    "patience": [*FREE, "optimiser.patience=1", "optimiser.evaluate_every=1"],
    "recorded": [*REPLAYED, "variants={a:{groups:all,own_draws:0,epochs:2}}"],
    "curriculum": [*REPLAYED, "variants={a:{epochs:2,loss:{curriculum:0.5,advantage:rank}}}"],
    "reward model": [*REPLAYED, "variants={a:{reward_model:{width:8},epochs:2}}"],
    "temperature band, best_kl": SELECTOR_SEEDS,
    "live": [*BUILTIN, "variants={a:{live:true,epochs:2}}"],
    "rounds": [*BUILTIN, "variants={a:{groups:own,rounds:2,epochs:1}}"],
    "calls": [*BUILTIN, "variants={a:{reward_model:{calls:100}}}"],
}
STOPS = (1, 2, 1)
"""A run is stopped at so many metrics that it logs, counted anew each time it goes on."""


def tensors_in(value):
    """All tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def hash_of(tensors):
    """A hash that neither names nor the order of tensors change."""
    each = []
    for tensor in tensors:
        array = tensor.detach().contiguous().numpy()
        each.append(hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()[:16]


def fingerprint(folder):
    """Hashes of a finished run, by file."""
    found = {}
    for path in sorted(folder.rglob("*.pt")):
        if path.name == "previous.pt":
            continue  # depends on the stops
        content = torch.load(path, weights_only=True)
        name = str(path.relative_to(folder))
        found[name] = hash_of(tensors_in(content["controller"]))
        if path.name == "last.pt":
            found[f"{name}, random"] = hash_of(content["extra"]["training"]["random"])
    for path in sorted(folder.rglob("metrics.csv")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = digest[:16]
    return found


@contextlib.contextmanager
def stopped_after(calls):
    """A block in which Ctrl-C is pressed when so many metrics have been logged."""
    log = Tracker.log
    left = calls

    def pressed(self, *arguments):
        nonlocal left
        log(self, *arguments)
        left -= 1
        if left == 0:
            interruption._latest_s = -10.0
            signal.raise_signal(signal.SIGINT)

    with patch.object(Tracker, "log", pressed):
        yield
    assert left <= 0, "the run ended before it was stopped"


def launch(words):
    """Train until Ctrl-C, or until a run would be judged; print only what fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(words)
    if status != 130:
        print(printed.getvalue(), file=sys.stderr)
        raise SystemExit(f"status {status}: {' '.join(words)}")


def fingerprints(words):
    """Those of a run that goes through, and of one that is stopped several times and resumed."""
    launch([*words, "runs=through"])
    for stop in STOPS:
        with stopped_after(stop):
            launch([*words, "runs=resumed"])
    launch([*words, "runs=resumed"])
    both = [fingerprint(Path(name)) for name in ("through", "resumed")]
    for name in ("through", "resumed"):
        shutil.rmtree(name)
    return both


def all_fingerprints(names):
    """Fingerprints by setting, made in a temporary folder."""
    os.environ |= VARIABLES
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patched,
    ):
        # what is judged is not compared here
        for experiment in (ControllerExperiment, SelectorExperiment):
            patched.setattr(experiment, "evaluate", judged)
        write_table(holes=0.1)
        small_beams(60)[0].save("b.safetensors")
        launch([*FREE, "runs=start"])
        few_demonstrations(patched, 60, 20)
        for name in names or SETTINGS:
            through, resumed = fingerprints(SETTINGS[name])
            differing = [key for key in through if through[key] != resumed.get(key)]
            if differing or through.keys() != resumed.keys():
                raise SystemExit(f"{name}: resumed, these differ: {differing}")
            found[name] = through
            print(f"{name}: {len(through)} hashes", flush=True)
    return found


def judged(*_):
    raise KeyboardInterrupt


if __name__ == "__main__":
    torch.set_num_threads(1)
    output, *chosen = sys.argv[1:]
    output = Path(output).absolute()
    output.write_text(json.dumps(all_fingerprints(chosen), indent=1) + "\n")
