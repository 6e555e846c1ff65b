"""A finished run in Weights & Biases: summaries, tables, curves, pictures, artifacts."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.experiments.results.decisions import SAMPLE, read_decisions
from knobwise.experiments.results.problem import WEIGHTS, problem_of

CELLS = 200_000
"""About so many cells has the table of decisions; more make W&B's pages slow."""


def summaries_of(results: Mapping[str, Any]) -> dict[str, float]:
    """`Test/<policy>/<number>`: the means over the budgets, for a selector the numbers at the shots of training; and
    `Val/…`, the scores that settings are chosen by, as means over the seeds."""
    problem = problem_of(results)
    main = problem.main_place(results)
    numbers = _numbers("Test", [row for row in _rows(results) if row.get(problem.place) == main])
    kind = "Beam_Score" if results.get("judged_by") == "best_beam" else "Accuracy"
    by_seed = {problem.validation: results.get("validation_utility")}
    by_seed |= {f"Val/{stage}/{kind}_Mean": scores for stage, scores in results.get("validation", {}).items()}
    return numbers | {name: sum(scores) / len(scores) for name, scores in by_seed.items() if scores}


def log_results(run: Any, results: Mapping[str, Any], folder: Path, images: Mapping[str, bytes] | None = None) -> None:
    """Log the content of `results.json` to a W&B run of job type evaluate; docs/metrics.md explains every name.

    `report.html`, `decisions.parquet` and checkpoints come from the folder of our run, if they exist; images are PNG.
    """
    import wandb
    from PIL import Image

    summaries = summaries_of(results)
    run.summary.update(summaries)
    if "best_seed" in results:  # whose checkpoint was kept
        run.summary["best_seed"] = results["best_seed"]
        if (id_file := folder / "wandb" / f"{run.name}-seed{results['best_seed']}.id").exists():
            run.summary["best_seed_run"] = id_file.read_text().strip()
    tables = {
        "Test/policies": _rows(results),
        "Test/differences": list(map(_flat, results.get("differences", []))),
        "Test/by_dataset": list(map(_flat, results.get("by_dataset", []))),
        "Test/knob_usage": [row | {"value": str(row["value"])} for row in results.get("knob_usage", [])],
        "Test/decisions": _decisions(results, folder),
    }
    logged: dict[str, Any] = {}
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if rows:
            logged[name] = wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
    if (folder / "report.html").exists():
        logged["report"] = wandb.Html(str(folder / "report.html"), inject=False)
    logged |= {f"Charts/{k}": wandb.Image(Image.open(io.BytesIO(png))) for k, png in (images or {}).items()}
    run.log(logged)
    _log_curves(run, results)
    log_profile(run, results.get("profile", {}))
    if (folder / "checkpoints" / "best.pt").exists():
        # W&B takes at most 100 keys
        trained = {key: value for key, value in summaries.items() if key.split("/")[1] in problem_of(results).trained}
        model = wandb.Artifact(_artifact_name(f"{run.group}-{run.name}"), "model", metadata=trained)
        for path in ("checkpoints/best.pt", "config.yaml", "results.json"):
            if (folder / path).exists():
                model.add_file(str(folder / path))
        run.log_artifact(model, aliases=["best"])


def _log_curves(run: Any, results: Mapping[str, Any]) -> None:
    """The numbers of every policy over the places, and how often each knob has each value."""
    problem = problem_of(results)
    if problem is WEIGHTS:  # its places are no numbers
        return
    place_key = problem.place
    head = place_key.removesuffix("_ms").capitalize()
    run.define_metric(place_key, hidden=True, summary="none")
    for part in (head, "Knobs"):  # W&B's own summary would be the number at the last budget
        run.define_metric(f"{part}/*", step_metric=place_key, summary="none")
    for place in problem.judged_at(results):
        curves = _numbers(head, [row for row in _rows(results) if row.get(place_key) == place])
        for use in results.get("knob_usage", []):
            if use[place_key] == place:
                curves[f"Knobs/{use['policy']}/{use['knob']}={use['value']}"] = use["share"]
        run.log({place_key: place, **curves})


def log_profile(run: Any, profile: Mapping[str, Any]) -> None:
    """Log the profile of a run as an artifact of type dataset: its name, digest and sizes, not its files.

    Online it becomes an input of the run; offline wandb cannot note that, and the run logs it.
    """
    import wandb

    data = wandb.Artifact(_artifact_name(f"profile-{profile.get('name', run.name)}"), "dataset", metadata=dict(profile))
    with data.new_file("profile.json") as file:
        file.write(json.dumps(profile, indent=1))
    (run.log_artifact if run.offline else run.use_artifact)(data)


def _decisions(results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The decisions of the trained policies and of the reference policies, at the main place, for as many samples as
    fit: all decisions of a sample or none. [] if the run has none."""
    try:
        frame = read_decisions(folder)
    except InputError:
        return []
    problem = problem_of(results)
    main = problem.main_place(results)
    if main is not None:
        frame = frame.filter(pl.col("place") == main)
    trained = {*problem.trained, *(results.get("variants") or ())} - set(problem.controls)
    references = {problem.low, problem.high} if problem.averaged else {problem.high}
    frame = frame.filter(pl.col("policy").is_in(list(trained | references)))
    names = [name for name in frame.columns if not frame[name].is_null().all()]
    sample = pl.struct(name for name in SAMPLE if name in names).rank("dense")
    count = frame.select(sample.max()).item()
    fits = max(1, CELLS * count // max(1, frame.height * len(names)))
    if fits < count:
        print(f"W&B: Test/decisions has {fits:,} of {count:,} samples, decisions.parquet all", file=sys.stderr)
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


def _numbers(head: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{head}/{row['policy']}/{name}": float(value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name not in ("budget_ms", "shots")
    }


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:128]
