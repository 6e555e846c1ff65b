"""A finished run in Weights & Biases: summaries, tables, curves, pictures, artifacts."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.results.decisions import SAMPLE, read_decisions
from knobwise.experiments.results.problem import DEADLINE, problem_of

CELLS = 200_000
"""About so many cells has the table of decisions; more make W&B's pages slow."""


def scores_by_seed(
    results: Mapping[str, Any], folder: Path
) -> dict[tuple[str, int], dict[str, float]]:
    """(stage, seed) → the test scores of what our run trained there, from its decisions: means over
    the budgets, for a selector at the shots of training. The stage is "" but for selectors, whose
    policies are stages."""
    problem = problem_of(results)
    staged = results.get("validation", {})
    policies = list(staged or problem.trained[:1])
    main = problem.main_place(results)
    if main is None:
        at_main = pl.lit(True)
    else:
        at_main = pl.col("place") == main
    frame = read_decisions(folder).filter(pl.col("policy").is_in(policies), at_main)
    in_time = pl.col("in_time").filter("feasible").mean()
    numbers = {problem.score.title(): "score", "Accuracy": "accuracy", "Latency_Mean": "latency_ms"}
    rows = (
        frame.group_by("policy", "seed", "place")
        .agg(
            *(pl.col(column).mean().alias(f"Test/{name}") for name, column in numbers.items()),
            in_time,
        )
        .group_by("policy", "seed", maintain_order=True)
        .agg(
            pl.selectors.starts_with("Test/").mean(),
            pl.col("in_time").mean().alias("Test/On_Time_Feasible"),
        )
        .sort("policy", "seed")
    )
    if problem is DEADLINE:
        low, high = (
            problem.row(results, policy, None)["utility"] for policy in (problem.low, problem.high)
        )
        if high - low > 1e-9:  # as in `results.json`
            rows = rows.with_columns(
                ((pl.col("Test/Utility") - low) / (high - low)).alias("Test/Oracle_Gap_Closed")
            )
    scores = [
        {k: v for k, v in row.items() if "/" in k and v is not None} for row in rows.to_dicts()
    ]
    if staged:
        stages: Any = rows["policy"]
    else:
        stages = [""] * len(rows)
    return dict(zip(zip(stages, rows["seed"], strict=True), scores, strict=True))


def summaries_of(results: Mapping[str, Any]) -> dict[str, float]:
    """`Test/<policy>/<number>`, the means over the budgets, for a selector at the shots of
    training: the score of every policy, and all numbers of the main one; `GRPO/…`, what GRPO added
    to the deployed policy; and `Val/…`, the scores that settings are chosen by, as means over the
    seeds."""
    problem = problem_of(results)
    main = problem.main_place(results)
    policy = problem.main_policy(results)
    few = (problem.score, *(f"{problem.score}_ci95_{end}" for end in ("low", "high")))
    every = (*few, *(metric.key for metric in problem.metrics))
    numbers = {
        f"Test/{row['policy']}/{key}": float(row[key])
        for row in _rows(results)
        for key in (every if row["policy"] == policy else few[:1])
        if row.get(problem.place) == main and isinstance(row.get(key), int | float)
    }
    if results.get("judged_by") == "best_beam":
        kind = "Beam_Score"
    else:
        kind = "Accuracy"
    by_seed = {problem.validation: results.get("validation_utility")}
    by_seed |= {
        f"Val/{stage}/{kind}_Mean": scores
        for stage, scores in results.get("validation", {}).items()
    }
    # what GRPO added to the deployed policy
    numbers |= {
        f"GRPO/{key}": float(value) for key, value in _flat(results.get("grpo_gain", {})).items()
    }
    return numbers | {name: sum(scores) / len(scores) for name, scores in by_seed.items() if scores}


def log_results(
    run: Any,
    folder: Path,
    results: Mapping[str, Any],
    images: Mapping[str, bytes] | None = None,
    model: Any = None,
) -> None:
    """Log the content of `results.json` to a W&B run of job type evaluate; docs/metrics.md explains
    every name.

    `report.html` and `decisions.parquet` come from the folder of our run, if they exist; images are
    PNG. `model` is what `log_model` gave to the run that trained.
    """
    import wandb
    from PIL import Image

    run.summary.update(summaries_of(results))
    if "best_seed" in results:  # whose checkpoint was kept
        run.summary["best_seed"] = results["best_seed"]
    problem = problem_of(results)
    rows = _rows(results)
    place = problem.place
    tables = {
        "Test/policies": [row for row in rows if row.get(place) == problem.main_place(results)]
    }
    tables |= {
        f"Test/{key}": list(map(_flat, results.get(key, [])))
        for key in ("differences", "by_dataset")
    }
    tables["Test/decisions"] = _decisions(results, folder)
    logged: dict[str, Any] = {name: _table(content) for name, content in tables.items() if content}
    by_place = _table([row for row in rows if row.get(place) is not None])
    title = f"{problem.score} by {problem.place_words[0]}".capitalize()
    logged[f"Test/by_{place.removesuffix('_ms')}"] = wandb.plot.line(
        by_place, place, problem.score, "policy", title
    )
    usage = [use | {"value": str(use["value"])} for use in results.get("knob_usage", [])]
    for knob in dict.fromkeys(use["knob"] for use in usage):
        table = _table(
            [use for use in usage if (use["policy"], use["knob"]) == (problem.usage[0], knob)]
        )
        logged[f"Knobs/{knob}"] = wandb.plot.line(
            table, place, "share", "value", f"{knob}: share of each value"
        )
    if (folder / "report.html").exists():
        logged["report"] = wandb.Html(str(folder / "report.html"), inject=False)
    logged |= {
        f"Charts/{k}": wandb.Image(Image.open(io.BytesIO(png))) for k, png in (images or {}).items()
    }
    run.log(logged)
    log_profile(run, results.get("profile", {}))
    if model is not None and not run.offline:
        run.use_artifact(model)


def _table(rows: list[dict[str, Any]]) -> Any:
    import wandb

    columns = list(dict.fromkeys(column for row in rows for column in row))
    return wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])


def log_model(run: Any, folder: Path, scores: Mapping[str, float]) -> Any:
    """Log the kept checkpoint of a run of ours as an artifact of the W&B run that trained it; gives
    the artifact."""
    import wandb

    model = wandb.Artifact(
        _artifact_name(f"{run.group}-{folder.name}"), "model", metadata=dict(scores)
    )
    for path in ("checkpoints/best.pt", "config.yaml", "results.json"):
        if (folder / path).exists():
            model.add_file(str(folder / path))
    logged = run.log_artifact(model, aliases=["best"])
    return logged if run.offline else logged.wait()


def log_profile(run: Any, profile: Mapping[str, Any]) -> None:
    """Log the profile of a run as an artifact of type dataset: its name, digest and sizes, not its
    files.

    Online it becomes an input of the run; offline wandb cannot note that, and the run logs it.
    """
    import wandb

    data = wandb.Artifact(
        _artifact_name(f"profile-{profile.get('name', run.name)}"),
        "dataset",
        metadata=dict(profile),
    )
    with data.new_file("profile.json") as file:
        file.write(json.dumps(profile, indent=1))
    (run.log_artifact if run.offline else run.use_artifact)(data)


def _decisions(results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The decisions of the trained policies and of the reference policies, at the main place, for
    as many samples as fit: all decisions of a sample or none. [] if the run has none."""
    try:
        frame = read_decisions(folder)
    except InputError:
        return []
    problem = problem_of(results)
    main = problem.main_place(results)
    if main is not None:
        frame = frame.filter(pl.col("place") == main)
    trained = {*problem.trained, *(results.get("variants") or ())} - set(problem.controls)
    if problem.averaged:
        references = {problem.low, problem.high}
    else:
        references = {problem.high}
    frame = frame.filter(pl.col("policy").is_in(list(trained | references)))
    names = [name for name in frame.columns if not frame[name].is_null().all()]
    sample = pl.struct(name for name in SAMPLE if name in names).rank("dense")
    count = frame.select(sample.max()).item()
    fits = max(1, CELLS * count // max(1, frame.height * len(names)))
    if fits < count:
        print(
            f"W&B: Test/decisions has {fits:,} of {count:,} samples; decisions.parquet has all",
            file=sys.stderr,
        )
    return frame.filter(sample <= fits).select(names).to_dicts()


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(map(_flat, problem_of(results).rows(results)))


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of results.json with its intervals as two columns; other lists are left out."""
    flat = {name: value for name, value in row.items() if not isinstance(value, list)}
    for name, interval in row.items():
        if name.endswith("ci95"):
            flat |= dict(zip((f"{name}_low", f"{name}_high"), interval, strict=True))
    return flat


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:128]
