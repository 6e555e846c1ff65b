"""Measure the built-in profile:
`python -m knobwise.testbeds.make.builtin --out DIR`.

The elastic model answers each of the scenes at all 64 configurations, several times, in random
order, on one thread and by its CPU time. Fixed products, timed before and after each answer, show
how fast the machine was at the moment; this is divided out. Then the files of the profile are
written to DIR/builtin. Repeat the command to resume it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.files import written_whole
from knobwise.common.json_text import read_json
from knobwise.envs.readers.feature_files import read_features
from knobwise.envs.tables.tensor_file import digest_of_tensors
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    Answer,
    Configuration,
    FirstStage,
    clock_ms,
)
from knobwise.profiling.measuring.machine import digests, one_thread, write_readable_json
from knobwise.profiling.measuring.measuring import LOG, read_measurements
from knobwise.profiling.measuring.outputs import write_table
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, ElasticRequests
from knobwise.testbeds.elastic.scenes import CELL
from knobwise.testbeds.make import to_out

WINDOW = 51
"""Measurements that one estimate of the machine's speed is the median of."""
MEASURED = ("sample_id", *KNOBS)
"""The columns of what was measured several times."""
TIMES = ("total_ms", "prefill_ms")
REFERENCE = "extra.reference_ms"
"""The column with the time of the products that show how fast the machine is."""
TOKENS = torch.ones(400, 96)
WEIGHTS = torch.ones(96, 384)
"""The factors of these products."""


class TimedElastic(ElasticAdaptive):
    """The elastic model, which also times fixed products before and after each answer: the extra
    `reference_ms`."""

    @property
    def identity(self) -> dict[str, Any]:
        """What tells the model from others: a digest of its weights."""
        return {"weights": digest_of_tensors(self.model.state_dict(), {})}

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Answer as the elastic model does."""
        before_ms = reference_ms()
        answers = super().answer(stages, configuration)
        both_ms = before_ms + reference_ms()
        for answer in answers:
            answer.extra["reference_ms"] = both_ms
        return answers


@torch.inference_mode()
def reference_ms() -> float:
    """Return the time of products as the model computes them, always the same: some 2 ms."""
    start = clock_ms()
    for _ in range(2):
        torch.relu(TOKENS @ WEIGHTS) @ WEIGHTS.T
    return clock_ms() - start


def without_drift(log: pl.DataFrame) -> pl.DataFrame:
    """Divide the momentary speed of the machine out of the times of a log.

    The model is ln ms = cell + slope · ln reference + level + jitter. The slope is that of a least
    squares line within cells. The level, which is what the reference does not show, is the running
    median of what is left over `WINDOW` measurements, shifted to a median of 0; a cell is the
    median of its ln ms without both. Level and cells are estimated in turn. Cells are measured in
    random order, so every running median covers a fair sample of them.

    Args:
        log: a row for each measurement, in the order of measuring; at least three of each cell,
            with the time of the reference in `REFERENCE`.
    """
    ln = pl.col("ln_ms", "ln_reference")
    logs = log.select(
        *MEASURED, ln_ms=pl.col("total_ms").log(), ln_reference=pl.col(REFERENCE).log()
    )
    within = logs.select(ln - ln.mean().over(MEASURED))
    slope = within.select(pl.col("ln_ms").dot("ln_reference")).item()
    slope /= within.select(pl.col("ln_reference").dot("ln_reference")).item()
    by_reference = slope * (logs["ln_reference"] - logs["ln_reference"].median())
    level = pl.Series("level", by_reference)
    for _ in range(4):
        steady = logs.with_columns(level).with_columns(steady=pl.col("ln_ms") - pl.col("level"))
        cells = steady.select(pl.col("steady").median().over(MEASURED)).to_series()
        running = (logs["ln_ms"] - by_reference - cells).rolling_median(
            WINDOW, min_samples=1, center=True
        )
        level = (by_reference + running - running.median()).alias("level")
    return log.with_columns(pl.col(TIMES) / level.exp())


def table_of(log: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the profile, by sample, configuration and repeat: exact match, the share
    of right words, and times with four significant digits."""
    exact = ElasticRequests()
    soft = ElasticRequests(soft=True)
    answers = log.select("sample_id", "text").rows()
    return (
        log.with_columns(
            pl.Series("accuracy", [exact.score(name, text) for name, text in answers], pl.Float32),
            pl.Series("soft_score", [soft.score(name, text) for name, text in answers], pl.Float32),
            pl.col("sample_id", *KNOBS, "repeat").cast(pl.Int32),
        )
        .sort(*MEASURED, "repeat")
        .select(
            *MEASURED,
            "repeat",
            "accuracy",
            "soft_score",
            latency_ms=pl.col("total_ms").round_sig_figs(4).cast(pl.Float32),
            prefill_ms=pl.col("prefill_ms").round_sig_figs(4).cast(pl.Float32),
            dataset=pl.lit("elastic_scenes"),
        )
    )


def write(out: Path) -> Path:
    """Write the profile from what was measured into ``out``; return its folder."""
    folder = out / "builtin"
    folder.mkdir(exist_ok=True)
    write_table(
        folder / "table.parquet", table_of(without_drift(read_measurements(out / "state" / LOG)))
    )
    ids, blocks, *_ = read_features(out / "features.safetensors")
    arrays: dict[str, Any] = {name: block.half().numpy() for name, block in blocks.items()}
    arrays["sample_id"] = np.array(ids, np.int32)
    with written_whole(folder / "features.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    rows = []
    for row, item in enumerate(ElasticRequests()):
        height, width = item.image.shape[2:]
        kind = item.question.partition("?")[0]
        rows.append((row, kind, item.question, item.answer, height // CELL, width // CELL))
    columns = ["sample_id", "question_type", "question", "answer", "rows", "columns"]
    write_table(folder / "samples.parquet", pl.DataFrame(rows, columns, orient="row"))
    facts = read_json(out / "profile.json")
    kept = ("name", "config", "model", "machine", "features_ms", "cost_s", "knobs", "samples")
    content = {
        "command": "python -m knobwise.testbeds.make.builtin --out DIR",
        **{name: facts[name] for name in (*kept, "configurations")},
        "clock": {
            "latency_ms": "CPU time of one thread, of four significant digits",
            "drift": f"divided out, by products that were timed before and after each answer, and "
            f"by the running median of {WINDOW} measurements",
        },
        "sha256": digests(folder, ("table.parquet", "features.npz", "samples.parquet")),
    }
    write_readable_json(folder / "profile.json", content)
    return folder


def measure(out: Path) -> None:
    """Measure the built-in profile into a folder, and write its files."""
    model = TimedElastic()
    config = VLMProfileConfig(name="elastic_scenes", repeats=3, clock="cpu")
    with one_thread():
        profile_vlm(out, model, model.questions, config)
    print(f"profile: {write(out)}")


def main() -> None:
    """Measure and write as the command line says."""
    to_out("Measure the built-in profile.", measure)


if __name__ == "__main__":
    main()
