"""A finished run in Weights & Biases: summaries, tables, curves, pictures, artifacts."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.common.progress import say
from knobwise.common.words import spelled
from knobwise.experiments.evidence.decisions import SAMPLE, read_decisions
from knobwise.experiments.evidence.results import not_known, rows_at
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.summarise import summarise, with_references
from knobwise.experiments.evidence.task import (
    ACCURACY,
    FEASIBLE,
    GAP,
    LATENCY,
    UTILITY,
    task_of,
)

if TYPE_CHECKING:
    import wandb
    from wandb.plot.custom_chart import CustomChart

CELLS = 200_000
"""The most cells, about, that the table of decisions has; more make W&B's pages slow."""
SCORES = {
    "Test/Utility": UTILITY,
    "Test/Oracle_Gap_Closed": GAP,
    "Test/On_Time_Feasible": FEASIBLE,
}
"""The test scores of a seed under a task that has them."""
ALWAYS = {"Test/Accuracy": ACCURACY, "Test/Latency_Mean": LATENCY}
"""The test scores of a seed under any task."""


def scores_by_seed(results: RunResults, folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Return the test scores of each policy that our run trained, by stage and seed, as `summarise`
    gives them for the decisions of one seed.

    They are means over the budgets or, for a selector, at the shots of training. The policies of a
    selector are its stages; for a controller the stage is "". An unknown score is left out.
    """
    task = task_of(results)
    staged = results.get("validation", {})
    trained = list(staged or task.trained[:1])
    metrics = {name: metric for name, metric in SCORES.items() if metric in task.metrics}
    metrics |= ALWAYS
    compared = with_references(task, _decided(results, folder, {*trained, task.low, task.high}))
    scores = {}
    for policy in sorted(trained):
        of_policy = compared.filter(policy=policy)
        for seed in of_policy["seed"].unique().sort():
            (row,) = summarise(of_policy.filter(seed=seed), list(metrics.values()), False)
            known = {name: row[metric.key] for name, metric in metrics.items()}
            key = policy if staged else "", seed
            scores[key] = {name: value for name, value in known.items() if value is not None}
    return scores


def _decided(results: RunResults, folder: Path, policies: Iterable[str]) -> pl.DataFrame:
    """Return the decisions of these policies at the main condition."""
    frame = read_decisions(folder).filter(pl.col("policy").is_in(list(policies)))
    main = task_of(results).main_condition(results)
    if main is None:
        return frame
    return frame.filter(pl.col("condition") == main)


def summaries_of(results: RunResults) -> dict[str, float]:
    """Return the numbers that W&B shows of a finished run, by name.

    - `Test/<policy>/<number>`: means over the budgets or, for a selector, at the shots of training.
      There is the score of every policy, and all numbers of the main one.
    - `GRPO/…`: what GRPO added to the deployed policy.
    - `Val/…`: the scores that settings are chosen by, as means over the seeds.
    """
    task = task_of(results)
    main = task.main_condition(results)
    policy = task.main_policy(results)
    score = task.score
    every = [score, f"{score}_ci95_low", f"{score}_ci95_high"]
    every += [metric.key for metric in task.metrics]
    numbers = {}
    # test scores, of the main policy all of them
    for row in _rows(results):
        if row.get(task.condition) == main:
            for key in every if row["policy"] == policy else [score]:
                if isinstance(row.get(key), int | float):
                    numbers[f"Test/{row['policy']}/{key}"] = float(row[key])
    for key, value in _flat(results.get("grpo_gain", {})).items():
        numbers[f"GRPO/{key}"] = float(value)
    kind = "Beam_Score" if results.get("judged_by") == "best_beam" else "Accuracy"
    # validation scores, as means over the seeds
    judged = results.get("validation_reward", results.get("validation_utility"))
    by_seed = {task.validation: judged}
    for stage, scores in results.get("validation", {}).items():
        by_seed[f"Val/{stage}/{kind}_Mean"] = scores
    return numbers | {name: sum(scores) / len(scores) for name, scores in by_seed.items() if scores}


def log_results(
    run: wandb.Run,
    folder: Path,
    results: RunResults,
    images: Mapping[str, bytes],
    model: wandb.Artifact | None,
) -> None:
    """Log the content of `results.json` to a W&B run of job type evaluate; docs/metrics.md explains
    every name.

    `report.html` and `decisions.parquet` come from the folder of our run.

    Args:
        images: PNG, by name.
        model: the artifact that `log_model` returned, which becomes an input, or None.
    """
    import wandb

    run.summary.update(summaries_of(results))
    if "best_seed" in results:  # the seed whose checkpoint was kept
        run.summary["best_seed"] = results["best_seed"]
    # tables, curves, the report and its pictures
    logged = _tables(results, folder) | _curves(results)
    logged["report"] = wandb.Html(str(folder / "report.html"), inject=False)
    with tempfile.TemporaryDirectory() as pictures:
        for number, (name, png) in enumerate(images.items()):
            # W&B copies a file as it is, and would compress an image once more
            path = Path(pictures, f"{number}.png")
            path.write_bytes(png)
            logged[f"Charts/{name}"] = wandb.Image(str(path))
        run.log(logged)
    log_profile(run, results["profile"])
    if model is not None and not run.offline:
        run.use_artifact(model)


def _tables(results: RunResults, folder: Path) -> dict[str, wandb.Table]:
    """Return the W&B tables that are not empty, by name."""
    task = task_of(results)
    main = task.main_condition(results)
    tables = {
        "Test/policies": [row for row in _rows(results) if row.get(task.condition) == main],
        "Test/differences": list(map(_flat, results.get("differences", []))),
        "Test/promises": list(map(_flat, results.get("promises", []))),
        "Test/by_dataset": list(map(_flat, results.get("by_dataset", []))),
    }
    tables["Test/decisions"] = _decisions(results, folder)
    return {name: _table(rows) for name, rows in tables.items() if rows}


def _curves(results: RunResults) -> dict[str, CustomChart]:
    """Return the W&B charts against the budget or the number of shots, by name."""
    import wandb

    task = task_of(results)
    axis = task.condition
    # a policy of which too little was measured has no score
    scored = [row for row in _rows(results) if row.get(task.score) is not None]
    rows = [row for row in scored if row.get(axis) is not None]
    title = f"{task.score} by {task.condition_words[0]}".capitalize()
    name = f"Test/by_{axis.removesuffix('_ms')}"
    curves = {}
    if rows:
        curves[name] = wandb.plot.line(_table(rows), axis, task.score, "policy", title)
    usage = [{**use, "value": str(spelled(use["value"]))} for use in results.get("knob_usage", [])]
    for knob in dict.fromkeys(use["knob"] for use in usage):
        shares = [use for use in usage if (use["policy"], use["knob"]) == (task.trained[0], knob)]
        title = f"{knob}: share of each value"
        curves[f"Knobs/{knob}"] = wandb.plot.line(_table(shares), axis, "share", "value", title)
    return curves


def _table(rows: Sequence[Mapping[str, object]]) -> wandb.Table:
    import wandb

    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [list(map(row.get, columns)) for row in rows]
    kinds = [{*map(type, values)} for values in zip(*data, strict=True)]
    types = [_type_of(kind - {NoneType}) for kind in kinds]
    if None in types:  # W&B finds out by itself, cell by cell, which takes twice as long
        return wandb.Table(columns=columns, data=data)
    optional = [NoneType in kind for kind in kinds]
    return wandb.Table(columns=columns, data=data, dtype=types, optional=optional)


def _type_of(kinds: set[type]) -> type | None:
    """Return the type that W&B is to give a column with values of these types; None for several."""
    if kinds and kinds <= {int, float}:
        return float
    return kinds.pop() if kinds in ({str}, {bool}) else None


def log_model(run: wandb.Run, folder: Path, scores: Mapping[str, float]) -> wandb.Artifact:
    """Log the kept checkpoint of our run as an artifact of the W&B run that trained it; return the
    artifact."""
    import wandb

    name = _artifact_name(f"{run.group}-{folder.name}")
    model = wandb.Artifact(name, "model", metadata=dict(scores))
    for path in ("checkpoints/best.pt", "config.yaml", "results.json"):
        model.add_file(str(folder / path))
    logged = run.log_artifact(model, aliases=["best"])
    if run.offline:
        return logged
    return logged.wait()


def log_profile(run: wandb.Run, profile: Mapping[str, object]) -> None:
    """Log the profile of a run as an artifact of type dataset: its name, digest and sizes, not its
    files.

    Online it becomes an input of the run. Offline wandb cannot record inputs, so the run logs it.
    """
    import wandb

    name = _artifact_name(f"profile-{profile['name']}")
    data = wandb.Artifact(name, "dataset", metadata=dict(profile))
    with data.new_file("profile.json") as file:
        file.write(json.dumps(profile, indent=1))
    (run.log_artifact if run.offline else run.use_artifact)(data)


def _decisions(results: RunResults, folder: Path) -> list[dict[str, object]]:
    """Return decisions of the trained policies and of the reference policies, at the main
    condition.

    They are of as many samples as fit into the table: all decisions of a sample or none.
    """
    task = task_of(results)
    trained = {*task.trained, *(results.get("variants") or ())} - set(task.controls)
    references = {task.low, task.high} if task.averaged else {task.high}
    main = rows_at(results, task.main_condition(results))
    # single outcomes of a policy of which too little was measured are predictions
    unknown = {policy for policy, row in main.items() if not_known(row)}
    frame = _decided(results, folder, (trained | references) - unknown)
    if not len(frame):
        return []
    names = [name for name in frame.columns if not frame[name].is_null().all()]
    # samples are numbered from 1, in the order of their ids
    sample = pl.struct(name for name in SAMPLE if name in names).rank("dense")
    count = frame.select(sample.max()).item()
    # as many whole samples as the limit of cells allows
    fits = max(1, CELLS * count // max(1, frame.height * len(names)))
    if fits < count:
        say(f"W&B: Test/decisions has {fits:,} of {count:,} samples; decisions.parquet has all")
    return frame.filter(sample <= fits).select(names).to_dicts()


def _rows(results: RunResults) -> list[dict[str, Any]]:
    return list(map(_flat, task_of(results).rows(results)))


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of results.json with each known interval as two columns; other lists are left
    out."""
    flat = {name: value for name, value in row.items() if not isinstance(value, list)}
    for name, interval in row.items():
        if name.endswith("ci95") and interval is not None:
            flat |= dict(zip((f"{name}_low", f"{name}_high"), interval, strict=True))
    return flat


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:128]
