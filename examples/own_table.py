"""Your own measurements: from a table of measured cells to a controller that decides.

    python examples/own_table.py measured.csv

A row is one sample under one configuration: `sample_id`, any columns that are knobs, `accuracy` and `latency_ms`.
Without an argument the example writes a simulated table first, with its features.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

import knobwise
from knobwise.envs import SimulatedConfig, simulate


def simulated_files(folder: Path) -> tuple[Path, Path]:
    """A CSV with a row for every measured cell, and the features of the samples. Simulated, to show the format."""
    table = simulate(SimulatedConfig(samples=300))
    rows = [
        {
            "sample_id": sample,
            **table.configuration(c),
            "accuracy": float(table.accuracy[n, c]),
            "latency_ms": float(table.latency_ms[n, c]),
        }
        for n, sample in enumerate(table.sample_ids)
        for c in range(table.num_configurations)
        if table.mask[n, c]
    ]
    pl.DataFrame(rows).write_csv(folder / "measured.csv")
    features = {name: block.numpy() for name, block in table.features.items()}
    np.savez(folder / "features.npz", sample_id=np.array(table.sample_ids), **features)
    return folder / "measured.csv", folder / "features.npz"


def main(measured: Path, features: Path | None = None, **settings: object) -> list[dict[str, object]]:
    """Train a controller on these files; return what it decides for the first three samples."""
    table = knobwise.read(measured, features=features)
    print(table)
    controller = knobwise.fit(table, **settings)
    requests = {name: block[:3] for name, block in table.features.items()}
    budget_ms = float(table.latency_ms[table.mask].median())
    decisions = controller.decide(requests, budget_ms)
    for sample, decision in zip(table.sample_ids, decisions, strict=False):
        print(f"sample {sample}, budget {budget_ms:.1f} ms: {decision}")
    return decisions


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*map(Path, sys.argv[1:]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(*simulated_files(Path(folder)))
