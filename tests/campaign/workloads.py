"""Every verb that writes, as small as it gets: what it needs in its folder, the command, and what
may be torn."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import BEAMS, OPTIMISER, TABLE, write_table
from helpers import few_demonstrations, small_beams
from replayed import logging_model, serve_requests, small_stack
from run_folders import write_run

import knobwise.__main__
from knobwise.agents.checkpoint import save_checkpoint
from knobwise.agents.learning.logged import read_log
from knobwise.agents.predictors.regressors import FAMILIES

QUICK = [*TABLE, *OPTIMISER, "seeds=[0]", "own_cost=false", "baselines=false", "policy.members=2"]
CONTROLLER = ["train", "experiment=controller", *QUICK, "policy.experts=[ridge]"]
LEAN = ["train", "experiment=lean", *QUICK]
REPLAY = [
    "train",
    "experiment=selector_replay",
    *BEAMS,
    "beams.path=b.safetensors",
    "sft.epochs=1",
    "grpo.epochs=1",
]
REPLAY += ["variants.grpo_recorded.epochs=1", "variants.shuffled_recorded.epochs=1"]
LIVE = [
    "train",
    "experiment=selector",
    "selector.width=16",
    "selector.heads=2",
    "tracking=disabled",
    "seeds=[0]",
]
LIVE += [f"{stage}.{key}" for stage in ("sft", "rce", "grpo") for key in ("epochs=1", "queries=64")]
LIVE += [
    f"variants.{name}=null"
    for name in ("grpo_recorded", "grpo_rounds", "shuffled_live", "shuffled_recorded")
]
LIVE += ["variants.hidden_live=null", "variants.grpo_live.epochs=1", "judged_shots=[2]", "jobs=1"]
SWEEP = [
    "train",
    "-m",
    "experiment=lean",
    "policy.hidden=8,16",
    "hydra/launcher=joblib",
    "hydra.launcher.n_jobs=2",
]
SWEEP += [word for word in QUICK if not word.startswith("policy.hidden")]
LAST = (("runs/latest", "link"),)
ELASTIC = [
    "profile",
    "model=elastic",
    "out=p",
    "knobs.samples=4",
    "knobs.max_crops=[1,4]",
    "knobs.top_k=[1,2]",
]
ELASTIC += ["knobs.num_active_blocks=[3]", "knobs.warm_up=0", "knobs.repeats=2"]
UPDATE = [
    "update",
    "checkpoint=stack.pt",
    "log=log",
    "out=served",
    "tracking=disabled",
    "trained_on=table",
]
UPDATE += [f"trained_on.{word.removeprefix('profile.')}" for word in TABLE[1:]]
EVALUATE = ["evaluate", *TABLE, "own_cost=false", "baselines=false", "json=e.json"]
ACKNOWLEDGED = "acknowledged.txt"
REQUESTS = 60


class Workload(NamedTuple):
    """A command, or a function that stands for the user's program."""

    name: str
    prepare: Callable[[], Any]
    """Writes what it needs into the working folder."""
    work: list[str] | Callable[[], Any]
    torn: str
    """Pattern of the files that may be torn: what it writes; for what only reads and writes in an
    instant, what it reads."""
    check: Callable[[], list[str]] | None = None
    """What is wrong in the folder, instead of a comparison with the unbroken run."""
    fresh: bool = False
    """In a new interpreter."""
    varies: tuple[tuple[str, str], ...] = ()
    """Files and places in them that differ from call to call."""


def _stack():
    write_table()
    agent, table = small_stack(60)
    save_checkpoint(
        "stack.pt", agent, table, {f"{part}_rows": rows for part, rows in _parts(60).items()}
    )


def _parts(samples):
    ends = (0, int(samples * 0.6), int(samples * 0.8), samples)
    return {
        part: torch.arange(*ends[i : i + 2])
        for i, part in enumerate(("train", "validation", "test"))
    }


def _nothing():
    """It needs no file."""


def _beams():
    small_beams(60)[0].save("b.safetensors")


def _trained():
    write_table()
    assert knobwise.__main__.main([*LEAN, "name=r"]) == 0


def _log():
    _stack()
    agent, table = small_stack(60)
    model = logging_model(Path("log"), agent, table, explore=0.2)
    serve_requests(model, table, 260)


def serve():
    """A program that serves requests; it notes each request after the log has taken it."""
    agent, table = small_stack(60)
    model = logging_model(Path("log"), agent, table)
    assert model.log is not None
    with open(ACKNOWLEDGED, "ab", buffering=0) as file:
        for result in serve_requests(model, table, REQUESTS):
            file.write(f"{result.request_id}\n".encode())


def every_acknowledged_request_is_logged():
    """What is wrong with the log that `serve` left, of which some processes were killed."""
    read = read_log("log")
    lines = Path(ACKNOWLEDGED).read_text().split("\n")[:-1] if Path(ACKNOWLEDGED).exists() else []
    ids = [row["id"] for row in read.rows]
    wrong = [
        f"{len(lost)} acknowledged requests are not in the log"
        for lost in [set(lines) - set(ids)]
        if lost
    ]
    files = len(list(Path("log").glob("*.jsonl")))
    aside = sum(read.aside.values())
    if (
        len(set(ids)) < len(ids)
        or aside > files
        or set(read.aside) - {"the torn last line of a file"}
    ):
        wrong.append(f"log: {dict(read.aside)}, {len(ids) - len(set(ids))} twice")
    return wrong


def _live():
    with pytest.MonkeyPatch.context() as patch:
        few_demonstrations(patch, 300, 60)
        if status := knobwise.__main__.main(LIVE):
            os._exit(status)


def _two_runs():
    for number in (0, 1):
        write_run(Path("runs/lean") / f"r{number}", gain=0.1 * number)


def fewer_trees():
    """As in the test suite: nothing here is about what trees learn."""
    FAMILIES["gradient_boosting"] = FAMILIES["gradient_boosting"]._replace(settings=(10, 40))


fewer_trees()
WORKLOADS = [
    Workload("train controller", write_table, CONTROLLER, "runs/**/*"),
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
