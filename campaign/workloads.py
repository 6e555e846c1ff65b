"""Every verb that writes, as small as it gets: what it needs in its folder, the command, and what
may be torn."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from commands import BEAMS, OPTIMISER, TABLE, launch, words_of, write_table
from helpers import few_demonstrations, small_beams
from replayed import logging_model, serve_requests, small_stack
from run_folders import note_metrics, write_run

from knobwise.__main__ import main
from knobwise.agents.learning.logged import read_log
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.agents.training.checkpoint import save_checkpoint

ONCE = words_of("seeds=[0] own_cost=false baselines=false policy.fold_networks=2")
QUICK = words_of(TABLE, OPTIMISER, ONCE)
CONTROLLER = words_of("train experiment=controller policy.experts=[ridge]", QUICK)
GRPO_ALONE = words_of(
    "train experiment=grpo_alone optimiser.iterations=8 optimiser.contexts=32",
    "optimiser.evaluate_every=4 policy.hidden=16 tracking=disabled",
    TABLE,
    ONCE,
)
LEAN = words_of("train experiment=lean", QUICK)
REPLAY = words_of(
    "train experiment=selector_replay sft.epochs=1 grpo.epochs=1 "
    "variants.grpo_recorded.epochs=1 variants.shuffled_recorded.epochs=1",
    BEAMS,
)
LIVE = words_of(
    "train experiment=selector selector.width=16 selector.heads=2 tracking=disabled seeds=[0] "
    "sft.epochs=1 sft.queries=64 rce.epochs=1 rce.queries=64 grpo.epochs=1 grpo.queries=64 "
    "variants.grpo_recorded=null variants.grpo_rounds=null variants.shuffled_live=null "
    "variants.shuffled_recorded=null variants.hidden_live=null variants.grpo_live.epochs=1 "
    "judged_shots=[2] jobs=1"
)
SWEEP = words_of(
    "train -m experiment=lean policy.hidden=8,16 hydra/launcher=joblib hydra.launcher.n_jobs=2"
)
SWEEP += [word for word in QUICK if not word.startswith("policy.hidden")]
LAST = (("runs/latest", "link"),)
ELASTIC = words_of(
    "profile model=elastic out=p knobs.samples=4 knobs.max_crops=[1,4] knobs.top_k=[1,2] "
    "knobs.num_active_blocks=[3] knobs.warm_up=0 knobs.repeats=2"
)
UPDATE = words_of(
    "update checkpoint=stack.pt log=log out=served trained_on=table "
    "trained_on.path=t.parquet trained_on.features=f.npz"
)
EVALUATE = ["evaluate", *TABLE, "own_cost=false", "baselines=false", "json=e.json"]
ACKNOWLEDGED = "acknowledged.txt"
REQUESTS = 60


class Workload(NamedTuple):
    """A command, or a function that stands for the user's program."""

    name: str
    prepare: Callable
    """Writes what it needs into the working folder."""
    work: list
    torn: str
    """Pattern of the files that may be torn: what it writes; for what only reads and writes in an
    instant, what it reads."""
    check: Callable = None
    """What is wrong in the folder, instead of a comparison with the unbroken run."""
    fresh: bool = False
    """In a new interpreter."""
    varies: tuple = ()
    """Files and places in them that differ from call to call."""


def _stack():
    write_table()
    agent, table = small_stack(60)
    parts = zip(("train", "validation", "test"), torch.arange(60).split([36, 12, 12]), strict=True)
    save_checkpoint("stack.pt", agent, table, {f"{part}_rows": rows for part, rows in parts})


def _nothing():
    """It needs no file."""


def _beams():
    small_beams(60)[0].save("b.safetensors")


def _trained():
    write_table()
    launch(LEAN, "name=r")


def _log():
    _stack()
    agent, table = small_stack(60)
    model = logging_model(Path("log"), agent, table, explore=0.2)
    serve_requests(model, table, 260)


def serve():
    """A program that serves requests; it notes each request after the log has taken it."""
    agent, table = small_stack(60)
    model = logging_model(Path("log"), agent, table)
    with open(ACKNOWLEDGED, "ab", buffering=0) as file:
        for seed in range(REQUESTS):
            (result,) = serve_requests(model, table, 1, seed=seed)
            file.write(f"{result.request_id}\n".encode())


def every_acknowledged_request_is_logged():
    """What is wrong with the log that `serve` left, of which some processes were killed."""
    read, file, wrong = read_log("log"), Path(ACKNOWLEDGED), []
    ids = [row["id"] for row in read.rows]
    # the last line may be torn
    noted = file.read_text().split("\n")[:-1] if file.exists() else []
    # the last process came to its end
    if len(noted) < REQUESTS:
        wrong.append(f"{len(noted)} requests of {REQUESTS} were acknowledged")
    if lost := {*noted} - {*ids}:
        wrong.append(f"{len(lost)} acknowledged requests are not in the log")
    twice, torn = len(ids) - len({*ids}), read.aside["the truncated last line of a file"]
    if twice or torn < read.aside.total() or torn > len(list(Path("log").glob("*.jsonl"))):
        wrong.append(f"log: {dict(read.aside)}, {twice} twice")
    return wrong


def _live():
    with pytest.MonkeyPatch.context() as patch:
        few_demonstrations(patch, 300, 60)
        if status := main(LIVE):
            os._exit(status)


def _two_runs():
    for number in (0, 1):
        note_metrics(write_run(Path("runs/lean") / f"r{number}", gain=0.1 * number))


def fewer_trees():
    """As in the test suite: nothing here is about what trees learn."""
    FAMILIES["gradient_boosting"] = FAMILIES["gradient_boosting"]._replace(settings=(10, 40))


fewer_trees()
WORKLOADS = [
    Workload("train controller", write_table, CONTROLLER, "runs/**/*"),
    Workload("train GRPO alone", write_table, GRPO_ALONE, "runs/**/*"),
    Workload("train selector, replay", _beams, REPLAY, "runs/**/*"),
    Workload("train selector, live", _nothing, _live, "runs/**/*"),
    Workload("sweep, joblib", write_table, SWEEP, "runs/**/*", fresh=True, varies=LAST),
    Workload("profile elastic", _nothing, ELASTIC, "p/**/*"),
    Workload("export", _trained, ["export", *TABLE, "out=e"], "runs/lean/r/checkpoints/*.pt"),
    Workload("evaluate", _trained, EVALUATE, "runs/**/*"),
    Workload(
        "compare", _two_runs, ["compare", "runs/lean", "html=c.html", "json=c.json"], "runs/**/*"
    ),
    Workload("update", _log, UPDATE, "[ls][oe]*/**/*"),
    Workload("request log", _stack, serve, "log/*", every_acknowledged_request_is_logged),
]
