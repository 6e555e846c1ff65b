"""The controller beside every simple way that reads features, on tables of different shape.

The share of the gap from budget-aware static (0) to the oracle (1), in hundredths, over all splits
of a run. *best* is controller − the best simple way of the table, in points of utility, with a 95 %
interval: a bootstrap over samples, where a sample that several splits test is drawn with all of its
results. The runs are those of a study, on three splits with decisions that cost nothing:

    python experiments/studies/study.py study=experiments/studies/tables.yaml seeds=[0] runs=tables
    python experiments/studies/simple_ways.py tables/controller/*
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEARNED = ("controller", "teacher")
SIMPLE = {
    "gradient_boosting": "boosting",
    "gaussian_process": "process",
    "kernel_ridge": "kernel",
    "random_forest": "forest",
    "ridge": "ridge",
    "knn": "neighbours",
    "latency_only": "latency",
}
"""Policies, and the heads of their columns."""
RESAMPLES = 4000


def utilities(run: Path) -> dict[str, tuple[Array, Array]]:
    """Return, of each policy, the summed utility of every test sample, and how often it was judged:
    [n] each, samples in the same order."""
    keys = ["policy", "dataset", "sample"]
    decisions = pl.scan_parquet(run / "decisions.parquet")
    table = decisions.group_by(keys).agg(pl.col("utility").sum(), pl.len()).sort(keys).collect()
    sums = {}
    for (policy,), part in table.group_by("policy", maintain_order=True):
        sums[str(policy)] = (part["utility"].to_numpy(), part["len"].to_numpy().astype(float))
    return sums


def mean(policy: tuple[Array, Array]) -> float:
    """Return the mean utility over all decisions."""
    return float(policy[0].sum() / policy[1].sum())


def interval(first: tuple[Array, Array], second: tuple[Array, Array]) -> list[float]:
    """Return the difference of two policies in points, and the ends of its interval."""
    count = len(first[0])
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    weights = np.concatenate([np.ones((1, count)), drawn])
    means = [(weights @ total) / (weights @ times) for total, times in (first, second)]
    points = 100 * (means[0] - means[1])
    return [float(points[0]), *np.percentile(points[1:], (2.5, 97.5)).tolist()]


def shares(sums: Mapping[str, tuple[Array, Array]]) -> dict[str, float]:
    """Return the share of the gap of each policy; {} where there is no gap."""
    static = mean(sums["budget_aware_static"])
    gap = mean(sums["oracle"]) - static
    names = [name for name in (*LEARNED, *SIMPLE) if name in sums]
    return {name: (mean(sums[name]) - static) / gap for name in names}


def words_of(points: list[float]) -> str:
    """Write a difference with its interval."""
    middle, low, high = (f"{value:+.1f}".replace("-", "−") for value in points)
    return f"{middle} [{low}, {high}]"


def main(runs: list[Path]) -> None:
    """Print the table, with the means of all tables and the best simple way on average."""
    heads = [*LEARNED, *SIMPLE.values()]
    print(f"| table | gap | {' | '.join(heads)} | best | static |")
    print("|---" * (len(heads) + 4) + "|")
    rows = []
    for run in runs:
        sums = utilities(run)
        row = shares(sums)
        simple = [name for name in SIMPLE if name in row]
        best = max(simple, key=lambda name: row[name])
        rows.append(row)
        static = sums["budget_aware_static"]
        gap = mean(sums["oracle"]) - mean(static)
        cells = [run.name.replace("_", " "), f"{100 * gap:.1f}"]
        cells += [f"{100 * row[name]:.0f}" if name in row else "–" for name in (*LEARNED, *SIMPLE)]
        cells.append(f"{words_of(interval(sums['controller'], sums[best]))}, {SIMPLE[best]}")
        cells.append(words_of(interval(sums["controller"], static)))
        print(f"| {' | '.join(cells)} |".replace(" -", " −"))
    averages = []
    for name in (*LEARNED, *SIMPLE):
        values = [row[name] for row in rows if name in row]
        averages.append(f"{100 * sum(values) / len(values):.1f}" if values else "–")
    print(f"| mean | | {' | '.join(averages)} | | |")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
