"""What a finished run leaves in Weights & Biases: summaries, tables, curves, pictures, artifacts."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError
from knobwise.experiments.results import selector_results
from knobwise.experiments.results.decisions_file import read_decisions

LEARNED = ("controller", *selector_results.LEARNED)
"""What is trained, whose numbers go with its checkpoint."""
COMPARED = ("budget_aware_static", "static_mix", "oracle")
"""Whose decisions stand in the table beside those of what is trained."""
CELLS = 200_000
"""The table of decisions holds about as many; what is more makes W&B's pages slow."""


def summaries_of(results: Mapping[str, Any]) -> dict[str, float]:
    """`Test/<policy>/<number>`: the means over the budgets, of a selector at the shots of training; and `Val/…`, what
    settings are chosen by, as a mean over the seeds."""
    axis, summarised = _axis(results)
    rows = [row for row in _rows(results) if row.get(axis) == summarised]
    return _numbers("Test", rows) | _validation(results)


def log_results(
    run: Any,
    results: Mapping[str, Any],
    folder: Path,
    *,
    images: Mapping[str, bytes] | None = None,
    profile_files: Sequence[str | Path] = (),
) -> None:
    """Log what a run found to its W&B run of job type evaluate; what is logged is said at `Tracker.log_results`.

    Args:
        run: a `wandb.Run`.
        results: the content of `results.json`.
        folder: of our run; `report.html`, `decisions.parquet` and checkpoints are taken from it where they exist.
        images: name → PNG.
        profile_files: put into the artifact of the profile.
    """
    import wandb
    from PIL import Image

    means = summaries_of(results)
    run.summary.update(means | _best_seed(results, folder, run.name))
    shown = {name: _table(rows) for name, rows in _tables(results).items() if rows}
    if (decisions := _decisions(results, folder)) is not None:
        shown["Test/decisions"] = decisions
    report = folder / "report.html"
    page = {"report": wandb.Html(str(report), inject=False)} if report.exists() else {}
    pictures = {f"Charts/{k}": wandb.Image(Image.open(io.BytesIO(png))) for k, png in (images or {}).items()}
    run.log({**shown, **page, **pictures})

    axis, _ = _axis(results)
    head = axis.removesuffix("_ms").capitalize()
    run.define_metric(axis, hidden=True, summary="none")
    for part in (head, "Knobs"):
        # W&B's own summary would be the number at the last budget, in a column of the table of runs
        run.define_metric(f"{part}/*", step_metric=axis, summary="none")
    rows, used = _rows(results), results.get("knob_usage", [])
    for place in sorted({row[axis] for row in rows if row.get(axis) is not None}):
        shares = {f"Knobs/{u['policy']}/{u['knob']}={u['value']}": u["share"] for u in used if u[axis] == place}
        run.log({axis: place, **_numbers(head, [row for row in rows if row.get(axis) == place]), **shares})

    log_profile(run, results.get("profile", {}), profile_files)
    if (folder / "checkpoints" / "best.pt").exists():
        # W&B takes at most 100 keys
        learned = {key: value for key, value in means.items() if key.split("/")[1] in LEARNED}
        model = wandb.Artifact(_artifact_name(f"{run.group}-{run.name}"), "model", metadata=learned)
        for path in ("checkpoints/best.pt", "config.yaml", "results.json"):
            if (folder / path).exists():
                model.add_file(str(folder / path))
        run.log_artifact(model, aliases=["best"])


def log_profile(run: Any, profile: Mapping[str, Any], files: Sequence[str | Path] = ()) -> None:
    """Log the profile that a run learned from as an artifact of type dataset: its name, digest and sizes, the files
    only when given. Online it becomes an input of the run, so that lineage leads from it to the checkpoint; offline,
    where wandb cannot note that, the run logs it.

    Args:
        run: a `wandb.Run`.
        profile: as in `results.json`.
    """
    import wandb

    name = _artifact_name(f"profile-{profile.get('name', run.name)}")
    data = wandb.Artifact(name, "dataset", metadata=dict(profile))
    with data.new_file("profile.json") as file:
        file.write(json.dumps(profile, indent=1))
    for path in files:
        data.add_file(str(path))
    if run.offline:
        run.log_artifact(data)
    else:
        run.use_artifact(data)


def _axis(results: Mapping[str, Any]) -> tuple[str, Any]:
    """The column that curves go over, and its value in the rows of the summary."""
    if results.get("system") == "selector":
        return "shots", selector_results.shown_at(results)
    return "budget_ms", None


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_flat(row) for row in [*results["rows"], *results.get("controls", [])]]


def _tables(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Name → rows with the same columns in the same order."""
    return {
        "Test/policies": _rows(results),
        "Test/differences": [_flat(row) for row in results.get("differences", [])],
        "Test/by_dataset": [_flat(row) for row in results.get("by_dataset", [])],
        "Test/knob_usage": [dict(row) | {"value": str(row["value"])} for row in results.get("knob_usage", [])],
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns = list(dict.fromkeys(column for row in rows for column in row))
    return wandb.Table(columns=columns, data=[[row.get(c) for c in columns] for row in rows])


def _decisions(results: Mapping[str, Any], folder: Path) -> Any:
    """The decisions of what is trained, budget-aware static and the oracle for the first samples, as many as fit: all
    decisions for a sample or none; of a selector at the shots of training. None where the run has none."""
    import polars as pl
    import wandb

    try:
        frame = read_decisions(folder)
    except InputError:
        return None
    if results.get("system") == "selector":
        simple = (*selector_results.SIMPLE, *selector_results.UPPER, *selector_results.CONTROLS)
        frame = frame.filter(pl.col("shots") == selector_results.shown_at(results))
        frame = frame.filter(~pl.col("policy").is_in(simple) | pl.col("policy").is_in(COMPARED))
        frame = frame.with_columns(pl.col("demonstrations").list.join(" "))
    else:
        frame = frame.filter(pl.col("policy").is_in((*LEARNED, *COMPARED)))
    names = [name for name in frame.columns if not frame[name].is_null().all()]
    samples = [name for name in ("dataset", "sample_id") if name in names]
    place = pl.struct(samples).rank("dense")
    count = frame.select(place.max()).item()
    fits = max(1, CELLS * count // max(1, frame.height * len(names)))
    if fits < count:
        print(f"W&B: Test/decisions has {fits:,} of {count:,} samples, decisions.parquet all", file=sys.stderr)
    return wandb.Table(columns=names, data=[list(row) for row in frame.filter(place <= fits).select(names).iter_rows()])


def _best_seed(results: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Which seed's checkpoint was kept, and which W&B run its training is."""
    if "best_seed" not in results:
        return {}
    seed = results["best_seed"]
    remembered = folder / "wandb" / f"{name}-seed{seed}.id"
    return {"best_seed": seed} | ({"best_seed_run": remembered.read_text().strip()} if remembered.exists() else {})


def _validation(results: Mapping[str, Any]) -> dict[str, float]:
    """What was held out of training, as a mean over the seeds: what settings are chosen by, the test split being kept
    for the end."""
    scores = {"Val/Utility": results.get("validation_utility")}
    if results.get("sense") == "mean":
        scores = {"Val/Reward_Mean": results.get("validation_utility")}
    kind = "Beam_Score" if results.get("judged_by") == "best_beam" else "Accuracy"
    scores |= {f"Val/{name}/{kind}_Mean": found for name, found in results.get("validation", {}).items()}
    return {name: sum(found) / len(found) for name, found in scores.items() if found}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of results.json with its intervals as two columns; other lists are left out."""
    ends = {f"{k}_{end}": v[i] for k, v in row.items() if k.endswith("ci95") for i, end in enumerate(("low", "high"))}
    return {name: value for name, value in row.items() if not isinstance(value, list)} | ends


def _numbers(head: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{head}/{row['policy']}/{name}": float(value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name not in ("budget_ms", "shots")
    }


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:128]
