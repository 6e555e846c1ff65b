"""The controller beside every simple way that reads features, on tables of different shape.

The share of the gap from budget-aware static (0) to the oracle (1), in hundredths, over all splits
of a run. *best* is controller − the best simple way of the table, in points of utility, with a 95 %
interval: a bootstrap over samples, seeds and splits, where a sample that several splits test is one
sample. Below the table stand the p of these differences, corrected for the number of tables. The
runs are those of a study, on three splits with decisions that cost nothing:

    python experiments/studies/study.py study=experiments/studies/tables.yaml seeds=[0] runs=tables
    python experiments/studies/simple_ways.py tables/controller/*
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from knobwise.experiments.evidence.decisions import FILE, splits_of
from knobwise.experiments.evidence.statistics import (
    corrected,
    ends_of_means,
    paired_differences,
    resampled_means,
)

Array = NDArray[np.float64]
LEARNED = ("controller", "teacher")
STATIC = "budget_aware_static"
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


@dataclass
class UtilitiesOfRun:
    """The decisions of a run.

    Args:
        utility: policy → its mean utility on each test sample of each split, [S, n].
        splits: the split and a number of each of these samples, [2, n]; None for one split.
    """

    utility: dict[str, Array]
    splits: NDArray[np.int64] | None

    @classmethod
    def of_run(cls, run: Path) -> UtilitiesOfRun:
        """Read the decisions of a run."""
        sample = ["split", "dataset", "sample"]
        keys = ["policy", "seed", *sample]
        decisions = pl.scan_parquet(run / FILE).group_by(keys)
        means = decisions.agg(pl.col("utility").cast(pl.Float64).mean(), pl.first("cluster"))
        frame = means.sort(keys).collect()
        utility = {}
        for (policy,), part in frame.group_by("policy", maintain_order=True):
            seeds = part.partition_by("seed", maintain_order=True)
            utility[str(policy)] = np.stack([of_seed["utility"].to_numpy() for of_seed in seeds])
        # every policy is judged on the same samples, static with one seed
        samples = frame.filter(policy=STATIC).select(*sample, "cluster")
        return cls(utility, splits_of(samples))

    def mean(self, policy: str) -> float:
        """Return the mean utility over all decisions."""
        return float(self.utility[policy].mean())

    def shares(self) -> dict[str, float]:
        """Return the share of the gap of each policy."""
        static = self.mean(STATIC)
        gap = self.mean("oracle") - static
        names = [name for name in (*LEARNED, *SIMPLE) if name in self.utility]
        return {name: (self.mean(name) - static) / gap for name in names}

    def compared(self, first: str, second: str) -> tuple[list[float], float]:
        """Return the difference of two policies in points with the ends of its interval, and p."""
        # a simple way has one seed
        other = self.utility[second].mean(0, keepdims=True)
        difference = self.utility[first] - other
        drawn = resampled_means([difference], splits=self.splits)
        (interval,) = ends_of_means([difference], drawn)
        numbers = None if self.splits is None else self.splits[1]
        sides = self.utility[first][..., None], other[..., None]
        ((*_, p),) = paired_differences(*sides, same_seeds=True, clusters=numbers)
        return [100 * float(value) for value in (difference.mean(), *interval)], p


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
    chances = []
    for run in runs:
        judged = UtilitiesOfRun.of_run(run)
        row = judged.shares()
        simple = [name for name in SIMPLE if name in row]
        best = max(simple, key=lambda name: row[name])
        rows.append(row)
        over_best, p = judged.compared("controller", best)
        chances.append(p)
        over_static, _ = judged.compared("controller", STATIC)
        gap = judged.mean("oracle") - judged.mean(STATIC)
        cells = [run.name.replace("_", " "), f"{100 * gap:.1f}"]
        cells += [f"{100 * row[name]:.0f}" if name in row else "–" for name in (*LEARNED, *SIMPLE)]
        cells += [f"{words_of(over_best)}, {SIMPLE[best]}", words_of(over_static)]
        print(f"| {' | '.join(cells)} |".replace(" -", " −"))
    averages = []
    for name in (*LEARNED, *SIMPLE):
        values = [row[name] for row in rows if name in row]
        averages.append(f"{100 * sum(values) / len(values):.1f}" if values else "–")
    print(f"| mean | | {' | '.join(averages)} | | |")
    words = [
        f"{run.name.replace('_', ' ')} {p:.2f}"
        for run, p in zip(runs, corrected(chances), strict=True)
    ]
    print(f"\np over the best, corrected for {len(runs)} tables (Holm): {', '.join(words)}")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
