"""Making a table of a long frame against filling the same arrays in a Python loop over its cells, in CPU time.

Prints cells per CPU-second of each and the ratio.
"""

from __future__ import annotations

import time

import numpy as np
import polars as pl

from knobwise.envs.profiles import table_from_frame

ROUNDS, SAMPLES, CONFIGURATIONS = 5, 1_000, 240


def frame() -> pl.DataFrame:
    cells = SAMPLES * CONFIGURATIONS
    return pl.DataFrame(
        {
            "sample_id": np.repeat(np.arange(SAMPLES), CONFIGURATIONS),
            "knob": np.tile(np.arange(CONFIGURATIONS), SAMPLES),
            "accuracy": np.linspace(0, 1, cells),
            "latency_ms": np.arange(cells, dtype=np.float64),
        }
    )


def in_a_loop(data: pl.DataFrame) -> None:
    accuracy, latency = np.full((2, SAMPLES, CONFIGURATIONS), np.nan)
    for sample, knob, score, time_ms in data.iter_rows():
        accuracy[sample, knob], latency[sample, knob] = score, time_ms


if __name__ == "__main__":
    data = frame()
    ways = {
        "table_from_frame": lambda: table_from_frame(data, name="t", knobs=["knob"]),
        "loop": lambda: in_a_loop(data),
    }
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.process_time()
            way()
            spent[name].append(time.process_time() - start)
    median = {name: float(np.median(values[1:])) for name, values in spent.items()}
    for name, seconds in median.items():
        print(f"{name}: {data.height / seconds / 1e6:.2f} M cells per CPU-second")
    print(f"ratio table_from_frame / loop: {median['table_from_frame'] / median['loop']:.3f}")
