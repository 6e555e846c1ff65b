"""Measure the built-in profile:
`python -m knobwise.profiling.elastic.profile --out DIR`.

The elastic model answers each of the scenes at all 64 configurations, several times, in random
order, on one thread and by its CPU time. Fixed products, timed before and after each answer, show
how fast the machine was at the moment; this is divided out. Then the files of the profile are
written to DIR/builtin. Repeat the command to resume it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.tables.tensor_file import digest_of, tensors_and_metadata
from knobwise.profiling.elastic.adapter import ElasticAdaptive, ElasticRequests
from knobwise.profiling.elastic.scenes import CELL
from knobwise.profiling.measuring.adaptive_model import (
    KNOBS,
    Answer,
    Configuration,
    FirstStage,
    clock_ms,
)
from knobwise.profiling.measuring.machine import digests, one_thread, write_json
from knobwise.profiling.measuring.measuring import read_logs
from knobwise.profiling.measuring.outputs import log_spread, write_table
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.settings import VLMProfileConfig

REPEATS = 3
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
FILES = ("table.parquet", "features.npz", "samples.parquet")


class TimedElastic(ElasticAdaptive):
    """The elastic model, which also times fixed products before and after each answer: the extra
    `reference_ms`."""

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


def table_of(log: pl.DataFrame, questions: ElasticRequests) -> pl.DataFrame:
    """Return the rows of the profile, by sample, configuration and repeat: exact match, the share
    of right words, and times with four significant digits."""
    soft = ElasticRequests(soft=True)
    answers = log.select("sample_id", "text").unique(maintain_order=True)
    scores = [(questions.score(*row), soft.score(*row)) for row in answers.rows()]
    judged = answers.with_columns(
        pl.Series("accuracy", [exact for exact, _ in scores], pl.Float32),
        pl.Series("soft_score", [share for _, share in scores], pl.Float32),
    )
    return (
        log.join(judged, ["sample_id", "text"])
        .with_columns(pl.col("sample_id", *KNOBS, "repeat").cast(pl.Int32))
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


def identity_of(model: ElasticAdaptive) -> dict[str, Any]:
    """Return what tells the model from others: its size, and a digest of its weights."""
    weights = digest_of(model.model.state_dict(), {})
    return {"size": asdict(model.model.size), "weights": weights}


def write(out: Path, samples: int) -> Path:
    """Write the profile from what was measured into ``out``; return its folder."""
    folder = out / "builtin"
    folder.mkdir(exist_ok=True)
    questions = ElasticRequests()
    log = read_logs(out / "state").filter(pl.col("sample_id").cast(pl.Int64) < samples)
    table = table_of(without_drift(log), questions)
    write_table(folder / "table.parquet", table)
    # the features of a sample in half precision
    blocks, metadata = tensors_and_metadata(out / "features.safetensors")
    ids = np.array(json.loads(metadata["sample_id"]), np.int32)
    image, language = (
        blocks[name].numpy().astype(np.float16) for name in ("image_features", "language_features")
    )
    with written_whole(folder / "features.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, sample_id=ids, image_features=image, language_features=language)
    rows = []
    for row in range(samples):
        item = questions.item(str(row))
        height, width = item.image.shape[2:]
        kind = item.question.partition("?")[0]
        rows.append((row, kind, item.question, item.answer, height // CELL, width // CELL))
    columns = ["sample_id", "question_type", "question", "answer", "rows", "columns"]
    write_table(folder / "samples.parquet", pl.DataFrame(rows, columns, orient="row"))
    facts = json.loads((out / "profile.json").read_text(encoding="utf-8"))
    kept = ("config", "model", "machine", "features_ms", "cost_s", "knobs")
    content = {
        "name": "elastic_scenes",
        "command": "python -m knobwise.profiling.elastic.profile --out DIR",
        **{name: facts[name] for name in kept},
        "samples": samples,
        "configurations": len(table.select(KNOBS).unique()),
        "clock": {
            "latency_ms": "CPU time of one thread, of four significant digits",
            "drift": f"divided out, by products that were timed before and after each answer, and "
            f"by the running median of {WINDOW} measurements",
            "log_spread_of_one_measurement": log_spread(table, MEASURED, "latency_ms"),
        },
        "sha256": digests(folder, FILES),
    }
    write_json(folder / "profile.json", content)
    return folder


def main() -> None:
    """Measure and write as the command line says."""
    parser = argparse.ArgumentParser(description="Measure the built-in profile.")
    parser.add_argument("--out", type=Path, required=True, help="folder to measure into")
    parser.add_argument(
        "--samples",
        type=int,
        default=ElasticRequests.length,
        help="scenes, each with a question",
    )
    arguments = parser.parse_args()
    if arguments.samples < 1:
        parser.error(f"--samples {arguments.samples}: must be at least 1")
    model = TimedElastic()
    questions = ElasticRequests()
    count = math.prod(len(values) for values in model.measured.values())
    items = [questions.item(row) for row in range(arguments.samples)]
    config = VLMProfileConfig(name="elastic_scenes", repeats=REPEATS, clock="cpu")
    print(f"{arguments.samples} × {count} × {REPEATS} measurements")
    try:
        with one_thread():
            profile_vlm(arguments.out, model, items, config, identity_of(model))
        folder = write(arguments.out, arguments.samples)
    except InputError as error:
        parser.error(str(error))
    print(f"profile: {folder}")


if __name__ == "__main__":
    main()
