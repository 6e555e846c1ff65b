"""What follows a training: judge, write, report, track."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from knobwise.common.files import sha256_of
from knobwise.common.progress import say
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.evidence.results import METRICS, not_known, write_results
from knobwise.experiments.evidence.run_folder import command_of
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.statistics import sign_of
from knobwise.experiments.evidence.task import Row, task_of
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.report.runs import find_runs
from knobwise.experiments.settings.tracking import Training
from knobwise.experiments.settings.words import shell_word
from knobwise.experiments.tracking.tracker import wandb_mode
from knobwise.experiments.tracking.wandb_results import scores_by_seed
from knobwise.experiments.tracking.workspace import save_once
from knobwise.experiments.train.run import Experiment, tracker_of


def finish(
    experiment: Experiment, folder: Path, overrides: list[str], commit: str | None
) -> tuple[RunResults, str]:
    """Judge what was trained, write the results and the report, and log them.

    Args:
        folder: of the run.
        overrides: the `key=value` words of the command line.
        commit: of the code that trained, see `git_commit`.

    Returns:
        The results, and the mode of W&B.
    """
    config = experiment.config
    say("evaluating every policy on the test split …")
    results, decisions = experiment.evaluate(folder)
    started = (folder / "config.yaml").stat().st_mtime
    date = f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M}"
    results |= {
        "experiment": config.experiment,
        "command": command_of(overrides),
        "run": {
            "started": date,
            "seconds": round(time.time() - started, 1),
            "commit": commit,
            "metrics_sha256": sha256_of(folder / METRICS),
        },
    }
    write_decisions(folder, decisions)
    write_results(folder, results)
    write_report(folder)
    return results, track_results(config, folder, experiment.table, results)


def print_finished(folder: Path, results: RunResults, mode: str) -> None:
    """Print the results of a run, where its report is, and what usually follows.

    Args:
        mode: of W&B.
    """
    print_results(results, Console())
    print(f"report: {folder.resolve() / 'report.html'}")
    if mode == "offline":
        print(f"W&B:    wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*")
    rule = results["rule"]["name"] if "rule" in results else None
    about = words_of_inspect(results)
    print(f"next:   {next_command(folder, sign_of_gain(results), rule, about)}")


def words_of_inspect(results: RunResults) -> list[str]:
    """Return the words with which `inspect` asks the same of the same profile: profile and budgets
    that were typed, or the built-in profile. [] where it cannot, since the experiment chose another
    profile, or what counts is a mean budget, a promise or a rule of the user's own."""
    words = shlex.split(results["command"])
    words = [word for word in words if re.match(r"profile[.=]|budgets_ms=", word)]
    counts_otherwise = "rule" in results or "promises" in results
    if counts_otherwise or task_of(results).equal_latency:
        return []
    if any(word.startswith("profile=") for word in words):
        return words
    return ["profile=builtin", *words] if results["profile"].get("name") == "builtin" else []


def sign_of_gain(results: RunResults) -> int | None:
    """Return 1 or −1 for a controller that is shown to be better or worse than static, 0 for one
    that is neither or of which that is not known, and None where nothing is compared."""
    task = task_of(results)
    learned: Row = task.row(results, "controller", task.main_condition(results))
    ci95 = learned.get(f"{task.compared[0]}_ci95") if task.compared else None
    return None if ci95 is None and not not_known(learned) else sign_of(ci95)


def next_command(
    folder: Path,
    gain: int | None = None,
    rule: str | None = None,
    about: Sequence[str] = (),
) -> str:
    """Return the command that usually follows a run, as a shell takes it.

    Args:
        gain: see `sign_of_gain`. A controller that loses is to be compared with others, and where
            one gains nothing, one looks at its profile.
        rule: of the user's own, which is given again.
        about: see `words_of_inspect`.
    """
    if gain == 0 and about:
        # what its features can tell, and what is wrong with it
        return shlex.join(["knobwise", "inspect", *about])
    checkpoint = shell_word("checkpoint", folder)
    if rule is not None:
        checkpoint += f" {shell_word('rule', rule)}"
    if (folder / "controller.npz").exists() and gain != -1:
        return f"knobwise export {checkpoint}"
    # to compare takes two
    if len(find_runs([str(folder.parent)])[0]) > 1:
        return f"knobwise compare {shlex.quote(str(folder.parent))}"
    return f"knobwise evaluate {checkpoint}"


def track_results(
    config: Training,
    folder: Path,
    table: ProfileTable | BeamTable,
    results: RunResults,
) -> str:
    """Log to W&B the results, and the test scores of each seed in the run that trained it.

    Returns:
        The mode of W&B.
    """
    model = None
    kept = (results.get("best_policy", ""), results.get("best_seed"))
    if wandb_mode(config.tracking) != "disabled":
        for (stage, seed), scores in scores_by_seed(results, folder).items():
            with tracker_of(config, folder, table, "train", seed, stage=stage) as tracker:
                model = tracker.log_scores(scores, (stage, seed) == kept) or model
    with tracker_of(config, folder, table, "evaluate") as tracker:
        # drawing pictures takes longer than everything else here
        images = result_images(results) if tracker.mode != "disabled" else {}
        tracker.log_results(results, images, model)
    if tracker.mode == "online" and config.tracking.workspace:
        knobs = [knob.name for knob in getattr(table, "knobs", ())]
        save_once(config.tracking, Path(config.runs), knobs)
    return tracker.mode
