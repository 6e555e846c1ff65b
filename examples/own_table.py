"""Your own measurements: from a table of measured cells to a controller that decides.

    python examples/own_table.py measured.csv

A row is one sample under one configuration: `sample_id`, any columns that are knobs, `accuracy` and
`latency_ms`. Without an argument the example writes the built-in profile as such a table, with its
features, and shows how it begins.
"""

import sys
import tempfile
from pathlib import Path

import knobwise
from knobwise.envs.readers.feature_files import write_features
from knobwise.envs.readers.long_table import write_long_table
from knobwise.testbeds import builtin_profile


def builtin_files(folder: Path) -> tuple[Path, Path]:
    """Write a CSV with a row for every measured cell, and the features of the samples."""
    table = builtin_profile()
    measured = folder / "measured.csv"
    features = folder / "features.npz"
    write_long_table(table, measured)
    write_features(table, features)
    print(*measured.read_text().splitlines()[:3], sep="\n")
    return measured, features


def main(
    measured: Path, features: Path | None = None, **settings: object
) -> list[dict[str, object]]:
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
            main(*builtin_files(Path(folder)))
