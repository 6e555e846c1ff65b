"""The curves of training: what was logged, over the steps, as means over the seeds."""

from __future__ import annotations

import math
from pathlib import Path

import altair as alt
import polars as pl

from knobwise.common.errors import InputError
from knobwise.common.files import sha256_of
from knobwise.envs.tables.cost_words import in_words
from knobwise.experiments.evidence.results import METRICS, are_held_out_known, grpo_begins
from knobwise.experiments.evidence.task import CONTROLS, Task
from knobwise.experiments.report import charts
from knobwise.experiments.report.comparison import Comparison
from knobwise.experiments.report.runs import Run
from knobwise.experiments.report.sentences import texts
from knobwise.experiments.report.words import policy_name

OF_STAGES = ("Reward_Mean", "Accuracy_Mean")
"""The numbers shown first of each stage of a selector's training. A stage logs under its name, as
in `Val/rce/Reward_Mean`."""
IMITATES = "Train/Imitation_Loss"
"""Logged from the step on where the network that is deployed begins to imitate its teacher; before
it the same curve is of the teacher's own network."""
POINTS = 1000
"""At most this many points go into a figure of training curves."""


def on_validation(comparison: Comparison) -> tuple[list[alt.LayerChart], dict[str, str]] | None:
    """Draw for each run the score on validation, what GRPO gained of it, and the rewards of stages;
    also return what the caption is filled with."""
    frames = []
    stages: dict[str, int] = {}
    for run in comparison.drawn():
        logged = None
        # where held-out choices were hardly measured, the curves would be of predictions
        if run.folder is not None and are_held_out_known(run.results):
            metrics = run.folder / METRICS
            ran = run.results.get("run")
            check_metrics(metrics, ran.get("metrics_sha256") if ran else None)
            logged = logged_numbers(metrics, run.task, comparison.unit)
        if logged is not None:
            name = policy_name(run.policy, run.results) if comparison.single else run.label
            curves = logged.filter(pl.col("variable") != IMITATES)
            score = logged.filter(variable=run.task.validation)
            for frame in (curves, _gained(run, score)):
                frames.append(frame.with_columns(policy=pl.lit(name)))
            stages |= _stages(run, logged)
    if not frames:
        return None
    return _drawn(pl.concat(frames), stages)


def _stages(run: Run, logged: pl.DataFrame) -> dict[str, int]:
    """Return the stages of a controller's training → the step where each begins, if it is known."""
    stages = {}
    imitates = logged.filter(variable=IMITATES)["step"]
    if len(imitates) and imitates.min() != logged["step"].min():
        stages["imitates its teacher"] = int(imitates.min())  # type: ignore[arg-type]
    for begins in grpo_begins(run.results):
        stages[(run.results.get("training") or {}).get("method", "GRPO")] = begins
    return stages


def _gained(run: Run, score: pl.DataFrame) -> pl.DataFrame:
    """Return how much more the score on validation is than what GRPO started with; utility in
    points."""
    results = run.results
    seeds = zip(results.get("seeds", []), results.get("chosen") or (), strict=False)
    starts = {str(seed): chosen["grpo"]["start"] for seed, chosen in seeds if chosen.get("grpo")}
    start = pl.col("seed").replace_strict(starts, default=None, return_dtype=pl.Float64)
    during = score.filter(pl.col("step") > max(grpo_begins(results), default=math.inf))
    gained, unit = {"utility": ("points", 100), "reward": ("reward", 1)}[run.task.judged_by]
    return during.with_columns(
        panel=pl.lit(f"GRPO alone: {gained} gained since it began"),
        value=unit * (pl.col("value") - start),
    ).drop_nulls("value")


def _drawn(
    logged: pl.DataFrame, stages: dict[str, int]
) -> tuple[list[alt.LayerChart], dict[str, str]]:
    """Draw a chart for each number: the mean over the seeds, and a band from the lowest to the
    highest; also return what a caption is filled with."""
    # steps that only some seeds reached have no mean over the seeds
    curve = ["policy", "panel"]
    last = pl.col("step").max().over(*curve, "seed").min().over(curve)
    value = pl.col("value")
    points = logged.filter(pl.col("step") <= last)
    points = points.group_by(*curve, "step", maintain_order=True).agg(
        value.mean().round_sig_figs(5), low=value.min(), high=value.max()
    )
    # a long curve is thinned: it has some of its points
    most = max(10, POINTS // max(1, points.select(curve).n_unique()))
    every = (pl.len().over(curve) - 1) // most + 1
    points = points.filter(pl.int_range(pl.len()).over(curve) % every == 0)
    of_stages = texts()["figures"]["training"]["stages"] * bool(stages)
    return charts.curves(points, stages), {"stages": of_stages}


def check_metrics(path: Path, noted: str | None) -> None:
    """Compare `metrics.csv` with the checksum that a run noted of it; older runs noted none.

    Raises:
        InputError: it is another file than the run wrote, such as half of it.
    """
    if noted is not None and path.exists() and sha256_of(path) != noted:
        raise InputError(
            f"{path}: does not match its checksum in results.json; restore a copy, or delete it to "
            "go without curves"
        )


def logged_numbers(path: Path, task: Task, unit: str) -> pl.DataFrame | None:
    """Read what a run logged of its scores on validation while it trained.

    Args:
        path: of `metrics.csv`.
        task: of the run.
        unit: of latencies.

    Returns:
        columns seed, step, variable, value and panel (the title of its chart), by the step at which
        a number was first logged; None if the file is missing or holds no such numbers. Of the
        training samples there is `IMITATES` alone.

    Raises:
        InputError: the file is no table, or not of a run.
    """
    if not path.exists():
        return None
    try:
        frame = pl.read_csv(
            path,
            infer_schema_length=None,
            schema_overrides={"seed": pl.String},
            glob=False,
        ).with_columns("seed", pl.col("step").cast(pl.Int64, strict=False))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise InputError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}); delete it to go without curves"
        ) from error
    titles = {}
    # other columns are of the system, such as times
    for name in [name for name in frame.columns if "/" in name]:
        part, *stage, number = name.split("/")
        of_stage = part == "Val" and number in OF_STAGES and {*stage}.isdisjoint(CONTROLS)
        is_drawn = name in ("Val/Utility", task.validation, IMITATES) or (stage and of_stage)
        if is_drawn and frame[name].dtype.is_numeric():
            title = in_words(texts()["logged"].get(number, number), unit)
            titles[name] = ": ".join([*stage, title]).replace("_", " ")
    if not titles:
        return None
    logged = frame.unpivot(list(titles), index=["seed", "step"]).cast({"value": pl.Float64})
    return (
        logged.drop_nulls()
        .filter(pl.col("value").is_finite())
        .with_columns(panel=pl.col("variable").replace_strict(titles))
        .sort(pl.col("step").min().over("panel"), "panel", "step")
    )
