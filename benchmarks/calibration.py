"""Published numbers beside those of a calibrated profile: `python benchmarks/calibration.py` prints both."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import polars as pl
from sklearn.linear_model import LinearRegression
from sklearn.metrics import mean_absolute_percentage_error, r2_score

from knobwise.envs.simulated.calibrated import (
    DATA_SETS,
    TOTAL_BLOCKS,
    CalibratedConfig,
    blocks_lost,
    calibrated_records,
)

PUBLISHED: dict[str, float] = {
    "prefill min": 68.7,
    "prefill p5": 102.3,
    "prefill p25": 119.7,
    "prefill p50": 135.0,
    "prefill p75": 151.7,
    "prefill p95": 175.3,
    "prefill max": 607.7,
    "prefill mean": 136.3,
    "prefill std": 22.2,
    "prefill CV inside a configuration": 0.18,
    "decode CV inside a configuration": 0.195,
    "step mean of a configuration, least": 36.0,
    "step mean of a configuration, most": 48.0,
    "prefill estimator R²": 0.93,
    "prefill estimator MAPE": 0.035,
    "removing 1–4 blocks: mean loss": 0.235,
    "removing 1–4 blocks: std of loss": 0.20,
    "removing block 0": 0.627,
    "removing the best single block": 0.031,
    "removing the best pair": 0.039,
}
"""Prefill and steps are in ms. The distribution of prefill is over the records of the 240 configurations, its variation
inside a configuration over those of the tiers. The loss of the best pair is the middle of the published .024–.054."""


def calibration_report(records: pl.DataFrame) -> dict[str, tuple[float, float]]:
    """The published and the simulated value of each number, by name.

    Args:
        records: from `calibrated_records`, with any grid. The ends of the Pareto front are those of the tiers; in a
            grid with max_crops the configurations with 2, 6 and 12 crops stand for them, and the names say which
            configuration was read.
    """
    by = [c for c in records.columns if c in ("tier", "max_crops", "top_k", "num_active_blocks")]
    prefill, times = records["prefill_ms"].to_numpy(), pl.col("prefill_ms", "step_ms")
    settings = records.group_by(by).agg((times.std() / times.mean()).name.suffix(" CV"), pl.col("step_ms").mean())
    simulated: dict[str, Any] = {"decode CV inside a configuration": settings["step_ms CV"].mean()}
    if "tier" in by:
        simulated["prefill CV inside a configuration"] = settings["prefill_ms CV"].mean()
    if len(settings) == 240:
        simulated |= {f"prefill p{q}": np.quantile(prefill, q / 100) for q in (5, 25, 50, 75, 95)}
        simulated |= {f"prefill {name}": getattr(prefill, name)() for name in ("min", "max", "mean", "std")}
        simulated["step mean of a configuration, least"] = settings["step_ms"].min()
        simulated["step mean of a configuration, most"] = settings["step_ms"].max()
    simulated["prefill estimator R²"], simulated["prefill estimator MAPE"] = _estimator(records)
    removals = [blocks_lost(s) for r in range(1, 5) for s in itertools.combinations(range(TOTAL_BLOCKS), r)]
    simulated |= {
        "removing 1–4 blocks: mean loss": np.mean(removals),
        "removing 1–4 blocks: std of loss": np.std(removals),
        "removing block 0": blocks_lost((0,)),
        "removing the best single block": min(removals[:TOTAL_BLOCKS]),
        "removing the best pair": min(map(blocks_lost, itertools.combinations(range(TOTAL_BLOCKS), 2))),
    }
    report = {name: (value, float(simulated[name])) for name, value in PUBLISHED.items() if name in simulated}
    for (dataset,), rows in records.group_by("dataset", maintain_order=True):
        report |= _data_set_report(str(dataset), rows, by)
    return report


def _data_set_report(dataset: str, rows: pl.DataFrame, by: list[str]) -> dict[str, tuple[float, float]]:
    known = DATA_SETS[dataset]
    means = rows.group_by(by).agg(pl.col("accuracy", "latency_ms").mean()).sort("latency_ms")
    if "tier" in by:  # the ends of the measured front, whichever configurations they are
        front = {"worst": means.head(1), "best": means.sort("accuracy", descending=True).head(1)}
    else:
        crops = min({"medium": 6, "high": 12}[known.best_tier], means["max_crops"].to_numpy().max())
        wanted = {"worst": (2, 4, 12), "best": (crops, 8, 16)}
        front = {end: means.filter(**dict(zip(by, at, strict=True))) for end, at in wanted.items()}
    report = {}
    for end, row in front.items():
        at = " ".join(str(row[k].item()) for k in by)
        for column, published in zip(("accuracy", "latency_ms"), getattr(known, end), strict=True):
            report[f"{dataset} {end} {column} ({at})"] = (float(published), float(row[column].item()))
    for what, how, published in zip(("mean", "least", "most"), ("mean", "min", "max"), known.tokens, strict=True):
        report[f"{dataset} tokens {what}"] = (float(published), float(getattr(rows["num_output_tokens"], how)()))
    return report


def _estimator(records: pl.DataFrame) -> tuple[float, float]:
    """R² and mean absolute percentage error of prefill, estimated by least squares in logarithms from vision tokens,
    text tokens, top_k, blocks and, where there is one, the tier."""
    x = records.select(pl.col("num_vision_tokens", "num_language_tokens", "top_k", "num_active_blocks").log())
    if "tier" in records.columns:
        x = x.hstack(records.select("tier").to_dummies(drop_first=True))
    y = records["prefill_ms"].to_numpy()
    estimate = np.exp(LinearRegression().fit(x.to_numpy(), np.log(y)).predict(x.to_numpy()))
    return r2_score(y, estimate), mean_absolute_percentage_error(y, estimate)


if __name__ == "__main__":
    for grid in ("240", "tiers"):
        print(f"grid {grid}: published, simulated")
        for name, (published, simulated) in calibration_report(calibrated_records(CalibratedConfig(grid=grid))).items():
            print(f"  {name:52} {published:8.3f} {simulated:8.3f}")
