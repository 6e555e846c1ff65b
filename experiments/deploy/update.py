"""Update a deployed controller from the log of its requests, or for other hardware from some cells
timed there.

Each update is a version on disk; which of them serves is a link, see
`knobwise.agents.serving.versions`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import polars as pl
import torch
from rich.console import Console
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.learning.adaptation import adapted, fit_offsets, log_ratios
from knobwise.agents.learning.logged import logged_of, read_log
from knobwise.agents.learning.update import Update, update
from knobwise.agents.policy.controller import NumpyController
from knobwise.agents.serving.versions import (
    CONTROLLER,
    CURRENT,
    VERSIONS,
    add_version,
    serve,
    serving,
)
from knobwise.common.errors import InputError
from knobwise.common.files import is_damaged, locked, write_text
from knobwise.common.progress import say
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.results.run_folder import VERSION, checkpoint_at
from knobwise.experiments.settings.options import UpdateRun
from knobwise.experiments.settings.profiles import LongTables, read_profile
from knobwise.experiments.tracking.tracker import Tracker

REQUESTS = 500
"""Number of fitted samples whose features show how sure the controller is."""
POLL_S = 1.0
"""Seconds between two readings of a growing log."""
UPDATE = "update.json"
STEPS = {"latencies": "offsets of latencies", "accuracies": "and of accuracies"}


def run(config: UpdateRun) -> Path:
    """Write a version, and let it serve where it is better; returns the one that serves.

    Raises:
        InputError: neither a log nor a profile, a controller that cannot learn, one that `out` does
            not serve, no version before the current one, too few requests; see also `read_log` and
            `log_ratios`.
    """
    out = Path(config.out)
    if config.rollback:
        return _roll_back(out)
    if (config.log is None) == (config.profile is None):
        raise InputError(
            "update: give log=FOLDER, the requests to learn from, or profile=table "
            "profile.path=FILE, the cells that were timed on other hardware"
        )
    if config.every is None or config.log is None:
        return _update(config, out)[0]
    _keep_updating(config, out, config.log, config.every)


def _keep_updating(config: UpdateRun, out: Path, log: str, every: int) -> NoReturn:
    """Update whenever the log has grown by `every` requests, until interrupted."""
    # the number of a version is its step in the log of updates
    last = max((int(path.name) for path in (out / VERSIONS).glob("[0-9]*")), default=0)
    tracker = Tracker(
        out,
        name=f"update-{out.name}",
        experiment="update",
        job_type="update",
        config=asdict(config),
        settings=config.tracking,
    )
    with tracker:
        known = 0
        while True:
            count = len(read_log(log).rows)
            if count >= known + every:
                known = count
                _, version, facts = _update(config, out)
                if int(version.name) > last:
                    last = int(version.name)
                    tracker.log(_metrics(facts), last)
                # later updates start from the version that serves
                config = replace(config, checkpoint=str(out / CURRENT))
            sleep(POLL_S)


def _metrics(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that are logged of an update, by name."""
    metrics = {"Log/Requests": facts["requests"], "Update/Better": facts["better"]}
    metrics |= {f"Log/{name}": value for name, value in facts["latest"].items()}
    for name, judgement in facts["steps"].items():
        gain = judgement["doubly_robust"]["difference"][0]
        metrics |= {f"Update/Gain_{name}": gain, f"Update/Bound_{name}": judgement["bound"]}
    return {name: value for name, value in metrics.items() if value is not None}


def _update(config: UpdateRun, out: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Make a new version; return the version that serves, the new one, and facts about it."""
    loaded = load_checkpoint(checkpoint_at(config.checkpoint))
    if problem := _problem(loaded, config.log is None):
        raise InputError(f"{config.checkpoint}: {problem}")
    digest = loaded.controller.decider.digest
    _check_serving(config, digest, serving(out))
    learn = _from_cells if config.log is None else _from_log
    updated, facts = learn(config, loaded, digest)
    with locked(out):
        current = serving(out)
        _check_serving(config, digest, current)  # another process may have been here
        if current is None:
            current = _added(out, loaded, {"before": None, "from": config.checkpoint})
            serve(out, current)
        version = _added(out, updated, {"before": current.name, **facts})
        outcome = f"not better with 95% confidence; version {current.name} keeps serving"
        if facts["better"]:
            serve(out, version)
            outcome = "serves now"
    print_lines(Console(), [f"{version}: {outcome}"])
    return serving(out) or version, version, facts


def _check_serving(config: UpdateRun, digest: str, current: Path | None) -> None:
    """Refuse to go on from another controller than the one that serves."""
    if current is None:
        return
    served = _read(current, "go back to the version before with rollback=true")
    if served.digest != digest:
        again = Path(config.out) / CURRENT
        raise InputError(
            f"out={config.out}: serves another controller than checkpoint={config.checkpoint}; "
            f"give checkpoint={again}, or another folder"
        )


def _read(version: Path, advice: str) -> NumpyController:
    """Read the controller of a version. Raises InputError with advice if it is damaged."""
    try:
        return NumpyController.load(version / CONTROLLER)
    except (OSError, ValueError) as error:
        raise InputError(f"{error}; {advice}") from error


def _added(out: Path, loaded: Loaded, facts: dict[str, Any]) -> Path:
    """Add a version with its checkpoint, its arrays, and facts about it; return its folder.

    A command that is given again, because it was killed or by mistake, finds the version that it
    made before.
    """
    # equal facts mean an equal version
    text = json.dumps(facts, indent=1)
    for version in (out / VERSIONS).glob("[0-9]*"):
        if not (version / UPDATE).exists() or (version / UPDATE).read_text() != text:
            continue
        damaged = [version / name for name in (VERSION, CONTROLLER) if is_damaged(version / name)]
        if not damaged:
            return version
        say(f"{damaged[0]}: is damaged; the version is made again")

    def write(folder: Path) -> None:
        loaded.save(folder / VERSION)
        loaded.controller.export(folder / CONTROLLER)
        write_text(folder / UPDATE, text)

    return add_version(out, write)


def _roll_back(out: Path) -> Path:
    """Let the version before the current one serve again. Raises InputError if its file is
    damaged."""
    if (current := serving(out)) is None:
        raise InputError(f"out={out}: it holds no version to roll back from")
    before = json.loads((current / UPDATE).read_text())["before"]
    if before is None:
        raise InputError(f"out={out}: {current.name} is the first version; there is none before it")
    version = out / VERSIONS / before
    _read(version, f"version {current.name} keeps serving; restore a copy")
    with locked(out):
        serve(out, version)
    print_lines(Console(), [f"{version}: serves again, in place of {current.name}"])
    return version


def _from_log(config: UpdateRun, loaded: Loaded, digest: str) -> tuple[Loaded, dict[str, Any]]:
    """Let a controller learn from the log, and print what the log shows.

    Returns:
        The controller of the new version, and facts about the update.
    """
    agent: Any = loaded.controller
    assert config.log is not None
    # requests count if this controller or an earlier version of it decided them
    versions = loaded.extra.get("versions", [])
    log = read_log(config.log, agent.decider, versions)
    print_lines(Console(), [f"{len(log.rows):,} requests of {config.log}", *log.lines()])
    if not log.rows:
        raise InputError(f"log={config.log}: no request in it can be used; see the lines above")
    # each step learns on some folds of the requests and is judged on the others
    logged = logged_of(log.rows, agent.decider)
    result = update(agent, logged, config.accept, loaded.extra.get("loss", 0.0))
    _print_steps(result, config.accept)
    latest = log.rows[-(config.every or len(log.rows)) :]
    facts = {
        "better": result.better,
        "requests": len(log.rows),
        "latest": _means(latest),
        "set_aside": dict(log.aside),
        "steps": {name: judgement.plain() for name, judgement in result.steps.items()},
        "doubts": result.doubts,
        "accepted": config.accept,
        "loss": result.loss,
        "factors": result.factors,
        "logits": result.logits,
    }
    extra = loaded.extra | {"versions": [*versions, digest], "loss": result.loss}
    return loaded._replace(agent=result.agent, extra=extra), facts


def _print_steps(result: Update, accept: bool) -> None:
    """Print a table with a row for each step of an update, and what speaks against the log."""
    header = ["step", "utility, new − old [95 %]", "bound", "different", "takes over"]
    rows = []
    lines = []
    for name, judgement in result.steps.items():
        gain, low, high = judgement.doubly_robust["difference"]
        difference = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        different = f"{judgement.different} of {judgement.requests}"
        doubts = result.doubts.get(name, [])
        takes_over = "yes" if judgement.better and (accept or not doubts) else "no"
        rows.append([STEPS[name], difference, f"{judgement.bound:+.3f}", different, takes_over])
        # those of the first step may hold for the second too
        lines += [f"- {doubt}" for doubt in doubts if f"- {doubt}" not in lines]
    print_table(Console(), Table(header, rows))
    if lines and accept:
        print_lines(Console(), ["It is accepted, although", *lines])
    elif lines:
        advice = (
            "Compare some of these requests with their answers. Leave out what is wrong; if the "
            "log is right, give accept=true."
        )
        print_lines(Console(), ["The log is doubtful:", *lines, advice])


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the on-time share, accuracy and utility of requests; None without labels."""
    frame = pl.DataFrame(rows, schema={"met": pl.Boolean, "accuracy": pl.Float64})
    # a request without a label counts in the on-time share only
    utility = (pl.col("accuracy") * pl.col("met")).mean()
    means = frame.select(On_Time=pl.mean("met"), Accuracy=pl.mean("accuracy"), Utility=utility)
    return means.row(0, named=True)


def _problem(loaded: Loaded, for_hardware: bool) -> str:
    """Return why a controller cannot be updated, or "" if it can."""
    agent = loaded.controller
    if agent.sense != "deadline":
        return (
            "decides for mean budgets, whose worths hold on one machine only; train on a profile "
            "of the other machine"
        )
    if agent.teacher is None:
        return (
            "has no teacher whose expectations could be adapted; train with policy=auto or "
            "policy=utility, or let AdaptiveModel.calibrate scale the budgets"
        )
    if for_hardware and "adapted" in loaded.extra:
        return "was already adapted; give the controller as it was trained"
    return ""


def _fitted(loaded: Loaded, table: ProfileTable) -> Tensor:
    """Return random rows that the controller was fitted on (any if it does not say), int64, at most
    `REQUESTS`."""
    rows = torch.arange(table.num_samples)
    if "train_rows" in loaded.extra:
        rows = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order[:REQUESTS]]


def _from_cells(config: UpdateRun, loaded: Loaded, digest: str) -> tuple[Loaded, dict[str, Any]]:
    """Adapt a controller to other hardware by cells timed there, and print its factors by knob.

    Args:
        digest: that of the controller as it was trained, kept as an earlier version of the adapted
            one.

    Returns:
        The adapted controller, and facts about the cells.
    """
    table = read_profile(config.trained_on, loaded)
    if table.digest != loaded.profile_digest:
        raise InputError(
            f"{config.checkpoint}: was trained on profile {loaded.profile_name!r}, but trained_on "
            f"is another, {table.name!r}; give the profile of the training, as in "
            "trained_on=table trained_on.path=FILE"
        )
    profile = config.profile
    if isinstance(profile, LongTables) and profile.knobs is None:
        # a few rows do not show which columns are knobs
        profile = replace(profile, knobs=[knob.name for knob in table.knobs])
    timed = read_profile(profile)
    chosen, ratios = log_ratios(table, timed)
    offsets = fit_offsets(table.configurations, chosen, ratios)
    factors = offsets.mean.exp()
    spread = offsets.variance.sqrt()
    facts = {
        "timed": timed.name,
        "digest": timed.digest,
        "cells": len(chosen),
        "factors": factors.tolist(),
        "spread": spread.tolist(),
        "one_factor": float(ratios.median().exp()),
    }
    agent: Any = loaded.controller
    # how sure the controller is, on samples that it was fitted on
    rows = _fitted(loaded, table)
    x = agent.controller.normaliser.of_rows(table, rows)
    _print_factors(table, offsets.mean)
    line = (
        f"{len(chosen)} timed cells: configurations take {factors.min():.2f} to "
        f"{factors.max():.2f} times as long as in training (± {spread.mean():.1%} for a single "
        f"request); one factor for all would be {facts['one_factor']:.2f}"
    )
    print_lines(Console(), [line])
    extra = loaded.extra | {"adapted": facts, "versions": [digest]}
    updated = loaded._replace(agent=adapted(agent, offsets, x), extra=extra)
    return updated, {"better": True, **facts}


def _print_factors(table: ProfileTable, offsets: Tensor) -> None:
    """Print, for each value of each knob, how much longer the other hardware takes.

    Args:
        offsets: ln(time here / time in training) of each configuration, float [C].
    """
    lines = []
    for k, knob in enumerate(table.knobs):
        for v, value in enumerate(knob.values):
            factor = offsets[table.configurations[:, k] == v].mean().exp()
            lines.append([knob.name, str(value), f"× {factor:.3f}"])
    print_table(Console(), Table(["knob", "value", "time, here / in training"], lines))
