"""Update a deployed controller from the log of its requests, or for other hardware from some cells
timed there.

Each update is a version on disk; which of them serves is a link, see
`knobwise.serving.versions`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.learning.acceptance import FEW
from knobwise.agents.learning.adaptation import (
    adapt_latency,
    fit_offsets,
    log_ratios,
    unmatched_cells,
)
from knobwise.agents.learning.logged import Logged, logged_of, read_log
from knobwise.agents.learning.update import Update, labels_beside_profile, update
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.common.errors import InputError
from knobwise.common.files import is_damaged, lock_folder, write_text
from knobwise.common.progress import say
from knobwise.common.words import format_count, points
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.exports import export_beside
from knobwise.experiments.evidence.run_folder import VERSION, checkpoint_at
from knobwise.experiments.inspection.logs import facts_of_faults, facts_of_limits, facts_of_times
from knobwise.experiments.report.inspection import said_of_faults, said_of_limits, said_of_times
from knobwise.experiments.report.sentences import write_sentences
from knobwise.experiments.settings.deployment_options import UpdateRun
from knobwise.experiments.settings.profiles import LongTables, read_profile
from knobwise.experiments.settings.words import shell_word
from knobwise.serving.versions import (
    CONTROLLER,
    CURRENT,
    VERSIONS,
    add_version,
    advice_on_versions,
    serve_version,
    serving_version,
    versions_in,
)

REQUESTS = 500
"""Number of samples of a profile that heads are distilled on."""
UPDATE = "update.json"


def update_controller(config: UpdateRun) -> None:
    """Write a version, and let it serve where it is better.

    Raises:
        InputError: neither a log nor a profile, a controller that cannot learn, one that `out` does
            not serve, no version before the current one, too few requests; see also `read_log` and
            `log_ratios`.
    """
    out = Path(config.out)
    if config.rollback:
        _roll_back(out)
    elif (config.log is None) == (config.profile is None):
        raise InputError(
            "update: give log=FOLDER, the requests to learn from, or profile=table "
            "profile.path=FILE, the cells that were timed on other hardware"
        )
    else:
        _update(config, out)


def _update(config: UpdateRun, out: Path) -> None:
    """Make a new version, and let it serve if it is better."""
    loaded = load_checkpoint(checkpoint_at(config.checkpoint), config.rule)
    agent = loaded.controller
    if agent.rule.is_own:
        raise InputError(
            f"{config.checkpoint}: was trained under {agent.rule.name}, and a log is judged by "
            "accuracy on time; train again on a newer profile"
        )
    if agent.calibration.promise:
        raise InputError(
            f"{config.checkpoint}: promises a share on time (policy.promise), and what is learned "
            "from a log was not tested for it; train again on a newer profile"
        )
    reason = ""
    if agent.rule.kind != "deadline":
        reason = "decides for mean budgets"
    elif agent.teacher is None:
        reason = "has no teacher whose expectations could move"
    if reason:
        raise InputError(
            f"{config.checkpoint}: {reason}; train with policy=auto or policy=utility for deadlines"
        )
    digest = agent.decider.digest
    _check_serving(config, digest, serving_version(out))
    learn = _from_cells if config.log is None else _from_log
    updated, facts = learn(config, loaded, digest)
    with lock_folder(out):
        current = serving_version(out)
        _check_serving(config, digest, current)  # another process may have been here
        if current is None:
            current = _added(out, loaded, {"before": None, "from": config.checkpoint})
            serve_version(out, current)
        version = _added(out, updated, {"before": current.name, **facts})
        outcome = f"not better with 95% confidence; version {current.name} keeps serving"
        if facts["better"]:
            serve_version(out, version)
            outcome = "serves now"
    print(f"{version}: {outcome}")


def _check_serving(config: UpdateRun, digest: str, current: Path | None) -> None:
    """Refuse to go on from another controller than the one that serves."""
    advice = "restore a copy, or give rollback=true"
    if current is not None and _read(current, advice).digest != digest:
        raise InputError(
            f"out={config.out}: serves another controller than checkpoint={config.checkpoint}; "
            f"give {shell_word('checkpoint', Path(config.out) / CURRENT)}, or another folder"
        )


def _read(version: Path, advice: str) -> NumpyController:
    """Read the controller of a version. Raises InputError with this advice if it is damaged."""
    try:
        return NumpyController.load(version / CONTROLLER)
    except (OSError, ValueError) as error:
        raise InputError(f"{error}; {advice}") from error


def _before(out: Path, current: Path) -> Path | None:
    """Return the version that served before the current one; None for the first.

    Raises:
        InputError: the facts about the current version do not name one that is there.
    """
    path = current / UPDATE
    try:
        name = json.loads(path.read_bytes())["before"]
        version = None if name is None else out / VERSIONS / name
        others = [each for each in versions_in(out) if each != current]
        if version not in (None, *others):
            raise ValueError(name)
    except (LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: does not say which version served before; {advice_on_versions(out)}"
        ) from error
    return version


def _added(out: Path, loaded: Loaded, facts: Mapping[str, object]) -> Path:
    """Add a version with its checkpoint, its arrays, and facts about it; return its folder.

    A command that is given again, because it was killed or by mistake, finds the version that it
    made before.
    """
    # equal facts mean an equal version
    text = json.dumps(facts, indent=1)
    for version in versions_in(out):
        path = version / UPDATE
        if not path.is_file() or path.read_bytes() != text.encode():
            continue
        files = [version / name for name in (VERSION, CONTROLLER)]
        damaged = [file for file in files if not file.is_file() or is_damaged(file)]
        if not damaged:
            return version
        say(f"{damaged[0]}: is damaged; the version is made again")

    def write(folder: Path) -> None:
        loaded.save(folder / VERSION)
        export_beside(folder / VERSION, loaded.controller, folder)
        write_text(folder / UPDATE, text)

    return add_version(out, write)


def _roll_back(out: Path) -> None:
    """Let the version before the current one serve again. Raises InputError if there is none, or it
    is damaged."""
    current = serving_version(out)
    version = current and _before(out, current)
    if version is None:
        raise InputError(f"out={out}: there is no version before the one that serves")
    _read(version, advice_on_versions(out))
    with lock_folder(out):
        serve_version(out, version)
    print(f"{version}: serves again")


def _from_log(config: UpdateRun, loaded: Loaded, digest: str) -> tuple[Loaded, dict[str, object]]:
    """Let a controller learn from the log, and print what the log shows.

    Returns:
        The controller of the new version, and facts about the update.
    """
    agent = loaded.controller
    # requests count if this controller or an earlier version of it decided them
    versions = loaded.extra.get("versions", [])
    log = read_log(str(config.log), agent.decider, versions)
    count = len(log.rows)
    print(f"{format_count(count, 'request')} of {config.log}", *log.lines(), sep="\n")
    logged = logged_of(log.rows, agent.decider)
    times = facts_of_times(log.rows)
    faults = facts_of_faults(log)
    over_limit = facts_of_limits(log.rows)
    unit = agent.decider.unit
    lines = write_sentences(said_of_limits(over_limit), unit)
    print(*lines, sep="\n", end="\n" * bool(lines))
    # from here on they would only take memory
    log.rows.clear()
    _print_labels(agent, logged)
    # each step learns on some folds of the requests and is judged on the others
    result = update(agent, logged, config.accept, loaded.extra.get("loss", 0.0), log.attempts)
    _print_steps(result, config.accept, unit)
    of_settings = said_of_times(times, unit, str(config.log), learned=result.better)
    print(*write_sentences(of_settings, unit), sep="\n")
    print(*said_of_faults(faults), sep="\n", end="\n" * bool(faults))
    facts = {
        "better": result.better,
        "requests": count,
        "set_aside": dict(log.aside),
        "over_limit": over_limit,
        "times": times,
        "without_answer": faults,
        "steps": {name: estimate._asdict() for name, estimate in result.steps.items()},
        "doubts": result.objections,
        "accepted": config.accept,
        "loss": result.loss,
    }
    extra = loaded.extra | {"versions": [*versions, digest], "loss": result.loss}
    return loaded._replace(agent=result.agent, extra=extra), facts


def _print_labels(agent: DeployedController, logged: Logged) -> None:
    """Print what the labels of each configuration that has enough say, beside the profile."""
    rows = labels_beside_profile(agent, logged)
    enough = [row for row in rows if row.labels >= FEW]
    for row in enough:
        print(f"{row}{': more than chance' if row.contradicts else ''}")
    if few := len(rows) - len(enough):
        print(f"{format_count(few, 'configuration')} with fewer than {FEW} labels")


def _print_steps(result: Update, accept: bool, unit: str) -> None:
    """Print a line for each step of an update, and what speaks against the log."""
    for name, estimate in result.steps.items():
        print(
            f"{in_words(name, unit)}: {points(estimate.gain)} points of utility (95 % lower bound "
            f"{points(estimate.bound)}); changes {estimate.different} of {estimate.requests} "
            "decisions"
        )
    # those of the first step may hold for the second too
    # each once, in order
    all_of_them = itertools.chain.from_iterable(result.objections.values())
    objections = dict.fromkeys(in_words(line, unit) for line in all_of_them)
    if not objections:
        return
    advice = (
        "The log may be wrong, so the update does not serve. Compare some of these requests with "
        "their answers: delete bad rows or, if the log is right, add accept=true."
    )
    print("Accepted (accept=true) despite:" if accept else advice, *objections, sep="\n- ")


def _from_cells(config: UpdateRun, loaded: Loaded, digest: str) -> tuple[Loaded, dict[str, object]]:
    """Adapt a controller to other hardware by cells timed there.

    Args:
        digest: that of the controller as it was trained, kept as an earlier version of the adapted
            one.

    Returns:
        The adapted controller, and facts about the cells.
    """
    if "adapted" in loaded.extra:
        raise InputError(
            f"{config.checkpoint}: was already adapted; give the controller as it was trained"
        )
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
    timed = read_profile(profile, some_cells=True)
    chosen, ratios = log_ratios(table, timed)
    left_out, why = unmatched_cells(table, timed)
    total = len(chosen) + left_out
    if left_out:
        print(
            f"{len(chosen)} of {format_count(total, 'timed cell')} are in the profile "
            f"{table.name!r}, which {why}; the others are left out"
        )
    offsets = fit_offsets(table.configurations, chosen, ratios)
    factors = offsets.mean.exp().tolist()
    print(
        f"{len(chosen)} timed cells: configurations take {min(factors):.2f} to {max(factors):.2f} "
        "times as long as in training"
    )
    facts = {
        "timed": timed.name,
        "digest": timed.digest,
        "cells": len(chosen),
        "cells_in_file": total,
        "factors": factors,
    }
    agent = loaded.controller
    order = torch.randperm(table.num_samples, generator=torch.Generator().manual_seed(0))
    x = agent.controller.normaliser.of_rows(table, order[:REQUESTS])
    extra = loaded.extra | {"adapted": facts, "versions": [digest]}
    updated = loaded._replace(agent=adapt_latency(agent, offsets, x), extra=extra)
    return updated, {"better": True, **facts}
