"""Making a table: from a long frame, by simulation, and from folders of records as large as any that was published.

Prints the cells per CPU second of `table_from_frame` and of filling the same arrays in a Python loop; the seconds of
simulating a calibrated profile; and, for exp5/exp6 and core_exp folders that are written into a temporary folder and
read in a process of their own, records per second, seconds and peak memory. `--full` makes 1.6 million records of each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
import torch
from timing import in_a_new_process, in_turns, medians, memory

from knobwise.envs.readers.exp_files import read_core_exp, read_exp5_exp6, write_exp5_exp6
from knobwise.envs.readers.long_table import table_from_frame
from knobwise.envs.simulated.calibrated import TIERS, CalibratedConfig, calibrated_records, simulate_calibrated

ROUNDS, SAMPLES, CONFIGURATIONS = 5, 1_000, 240
FULL = 2_276
"""With so many samples in each of three data sets, 240 configurations make 1.6 million records."""
DATA_SETS = ("text_vqa", "coco_vqa", "okvqa")


def in_a_loop(data: pl.DataFrame) -> None:
    accuracy, latency = np.full((2, SAMPLES, CONFIGURATIONS), np.nan)
    for sample, knob, score, time_ms in data.iter_rows():
        accuracy[sample, knob], latency[sample, knob] = score, time_ms


def frames() -> None:
    sample, knob = (each.ravel() for each in np.indices((SAMPLES, CONFIGURATIONS)))
    data = pl.DataFrame({"sample_id": sample, "knob": knob, "accuracy": np.linspace(0, 1, sample.size)})
    data = data.with_columns(latency_ms=np.arange(sample.size, dtype=np.float64))
    functions = {
        "table_from_frame": lambda: table_from_frame(data, name="t", knobs=["knob"]),
        "loop": lambda: in_a_loop(data),
    }
    in_turns(functions, 1, 1)  # warms up
    ms = medians(in_turns(functions, ROUNDS - 1, 1))
    for name, each in ms.items():
        print(f"{name}: {data.height / each / 1e3:.2f} M cells per CPU second")
    print(f"ratio table_from_frame / loop: {ms['table_from_frame'] / ms['loop']:.3f}")


def write(kind: str, folder: Path, samples: int) -> None:
    """Files with all that profilers write: also a prediction, the annotators' answers, facts about the sample."""
    config = CalibratedConfig(samples=samples)
    if kind == "core_exp":  # one data set, fewer configurations: as many records in fewer, larger files
        config = CalibratedConfig(("text_vqa",), samples * 3 * 240 // 75, "tiers")
    records = calibrated_records(config).with_columns(pred=pl.lit("stop sign"))
    for (dataset,), rows in records.group_by("dataset", maintain_order=True):
        if kind == "core_exp":
            write_core_exp(rows.drop("dataset"), folder / str(dataset).replace("_", "-"), str(dataset))
        else:
            rows = rows.with_columns(answers=pl.concat_list([pl.lit("stop sign")] * 10)).drop("dataset")
            write_exp5_exp6(rows, folder / "exp5", folder / "exp6", str(dataset))


def write_core_exp(rows: pl.DataFrame, folder: Path, dataset: str) -> None:
    stages = {"T_vision_total": "vision_ms", "T_LLM_prefill": "prefill_ms", "T_LLM_decode": "decode_ms"}
    facts = pl.struct(image_id="sample_id", question=pl.lit("what does the sign say?"))
    rows = rows.with_columns(**stages, T_total="latency_ms", metadata=facts)
    folder.mkdir(parents=True)
    for (tier, top_k, blocks), cells in rows.group_by("tier", "top_k", "num_active_blocks", maintain_order=True):
        stem = f"{dataset}_imgsizetier-{tier}_crops{TIERS[str(tier)][1]}_topk{top_k}_blocks{blocks}.json"
        (folder / stem).write_text(json.dumps({"num_samples": cells.height, "per_sample_results": cells.to_dicts()}))


def read(kind: str, folder: Path) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    if kind == "core_exp":
        table = read_core_exp(folder, "text_vqa")
    else:
        table = read_exp5_exp6(folder / "exp5", folder / "exp6", DATA_SETS)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    records, peak = int(table.mask.sum()), memory("VmHWM") / 1024
    print(
        f"{kind}: {records:,} records in {seconds:.1f} s ({records / seconds:,.0f} per second, {cpu:.1f} CPU-seconds), "
        f"peak memory {peak:.2f} GiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=FULL // 10, help="of each of the three data sets")
    parser.add_argument("--full", action="store_true", help=f"--samples={FULL}: 1.6 million records")
    parser.add_argument("--folder", type=Path, help="only read what lies there, of this --kind")
    parser.add_argument("--kind", choices=("exp5_exp6", "core_exp"), default="exp5_exp6")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for a busy core would count as CPU time
    if chosen.folder:
        read(chosen.kind, chosen.folder)
    else:
        samples = FULL if chosen.full else chosen.samples
        frames()
        start = time.perf_counter()
        table = simulate_calibrated(CalibratedConfig(samples=samples))
        print(f"simulated {table.accuracy.numel():,} records with features: {time.perf_counter() - start:.1f} s")
        for kind in ("exp5_exp6", "core_exp"):
            with tempfile.TemporaryDirectory() as folder:
                write(kind, Path(folder), samples)
                in_a_new_process(read, kind, Path(folder))
