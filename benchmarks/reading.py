"""Reading profiles, beside the least that polars and orjson need for the same measurements.

The plain ways check nothing: no ids that occur twice, no values out of range, no cells that are
missing. They return arrays samples × configurations of accuracy and latency, as the table holds
them. `knobwise.read` of a small file, as a whole process, stands beside the import of PyTorch, in
whose tensors a table is.

    python benchmarks/reading.py
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import numpy as np
import orjson
import polars as pl
from timing import Bench, peak_mb, run

from knobwise.envs.readers.exp_files import read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.long_table import read_long_table

KNOBS = {"max_crops": (2, 4, 8, 12), "top_k": (1, 2, 3, 4), "num_active_blocks": (3, 4, 5, 6)}
CONFIGURATIONS = 64
Arrays = tuple[np.ndarray, np.ndarray]


def measurements(rows: int) -> pl.DataFrame:
    """Return a long table of so many rows, one for each sample and configuration."""
    rng = np.random.default_rng(0)
    count = rows // CONFIGURATIONS
    grid = np.stack(np.meshgrid(*KNOBS.values(), indexing="ij"), -1).reshape(-1, len(KNOBS))
    columns = {"sample_id": np.repeat(np.arange(count), CONFIGURATIONS)}
    for name, values in zip(KNOBS, grid.T, strict=True):
        columns[name] = np.tile(values, count)
    columns["accuracy"] = rng.integers(0, 2, count * CONFIGURATIONS).astype(np.float64)
    columns["latency_ms"] = rng.uniform(2, 15, count * CONFIGURATIONS)
    return pl.DataFrame(columns)


def dense(frame: pl.DataFrame) -> Arrays:
    """Return accuracy and latency of a complete long table, by sample and configuration."""
    frame = frame.sort("sample_id", *KNOBS)
    accuracy = frame["accuracy"].to_numpy().reshape(-1, CONFIGURATIONS)
    return accuracy, frame["latency_ms"].to_numpy().reshape(-1, CONFIGURATIONS)


def plain_parquet(path: Path) -> Arrays:
    """Read a Parquet file by polars alone."""
    return dense(pl.read_parquet(path))


def plain_files(folder: Path) -> Arrays:
    """Read exp5 and exp6 files by orjson and polars alone."""
    sides = []
    for kind, key, column in (
        ("exp5", "score", "accuracy"),
        ("exp6", "T_total_ms", "latency_ms"),
    ):
        frames = []
        for path in (folder / kind).rglob("*.json"):
            document = orjson.loads(path.read_bytes())
            records = document.get("all_samples") or document["per_sample_latencies"]
            setting = map(int, re.findall(r"(?:crops|topk|blocks)(\d+)", path.name))
            frame = pl.DataFrame(records).select("sample_id", pl.col(key).alias(column))
            knobs = zip(KNOBS, setting, strict=True)
            frames.append(frame.with_columns(**{name: pl.lit(value) for name, value in knobs}))
        sides.append(pl.concat(frames))
    return dense(sides[0].join(sides[1], on=["sample_id", *KNOBS]))


def small_file(bench: Bench, path: Path) -> None:
    """Time `knobwise.read` of a CSV of 3 MB, and measure its memory."""
    measurements(90_000).write_csv(path)
    ours = "-c", f"import knobwise; knobwise.read({str(path)!r})"
    torch = "-c", "import torch"
    what = "a process with `knobwise.read` of 3 MB of CSV"
    peers = {"import torch": functools.partial(run, *torch)}
    bench.line(what, "s", functools.partial(run, *ours), peers.copy, target="≤ 1.25 ×")
    mine = peak_mb(*ours)
    ratio = "" if bench.ours else f"{mine / peak_mb(*torch):.3g} × import torch"
    bench.tell("its peak memory", "MB", mine, ratio, target="≤ 1.15 ×")


def main() -> None:
    """Time small files, then the formats of large ones."""
    bench = Bench()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small_file(bench, folder / "small.csv")
        rows = 800_000
        write_exp5_exp6(measurements(rows), folder / "exp5", folder / "exp6", "text_vqa")
        bench.line(
            f"reading {2 * rows:,} records of exp5 and exp6",
            "s",
            functools.partial(read_exp5_exp6, folder / "exp5", folder / "exp6", "text_vqa"),
            lambda: {"orjson and polars alone": functools.partial(plain_files, folder)},
        )
        rows = 10_000_000
        path = folder / "table.parquet"
        measurements(rows).write_parquet(path)
        bench.line(
            f"reading {rows:,} rows of Parquet",
            "s",
            functools.partial(read_long_table, path),
            lambda: {"polars alone": functools.partial(plain_parquet, path)},
        )


if __name__ == "__main__":
    main()
