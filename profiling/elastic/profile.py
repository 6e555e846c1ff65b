"""Profile the elastic model. It can be interrupted at any time.

profile_elastic("out")  →  out/table.parquet  features.npz  samples.parquet  profile.json
                           out/exp5/…  out/exp6/…  (the same as exp5/exp6 files)  out/state/…  (to resume from)
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from knobwise.common.files import written_whole
from knobwise.profiling.elastic.adapter import ElasticAdaptive, question_of
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.scenes import CELL, Scenes, draw_samples, share_of_right, to_words
from knobwise.profiling.elastic.settings import ElasticProfileConfig
from knobwise.profiling.measuring.adaptive_model import KNOBS, check_configuration
from knobwise.profiling.measuring.machine import claim, cpu_name, digests, one_thread, write_json
from knobwise.profiling.measuring.measuring import Plan, appended, measure, read_logs
from knobwise.profiling.measuring.outputs import (
    CLOCK_NAMES,
    WINDOW,
    cells_of,
    features_ms,
    long_records,
    measurements_of,
    steadiness,
    without_drift,
    write_exp_files,
    write_table,
)
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import changed_settings

DATASET = "elastic_scenes"
_WARM_UP_ROUNDS = 3


def profile_elastic(out_dir: str | Path, config: ElasticProfileConfig | None = None) -> Path:
    """Measure every configuration, write the profile, and return its folder.

    Repeat the call with the same ``config`` to resume it. Everything runs on one torch thread. Raises ValueError for
    settings that the model cannot run, or another run in ``out_dir``.
    """
    config = config or ElasticProfileConfig()
    if config.quick:
        config = replace(config, samples=min(config.samples, 32), repeats=1)
    model = ElasticAdaptive()
    for configuration in config.configurations:
        check_configuration(model.knobs, configuration._asdict())

    samples = draw_samples(config.samples, config.seed)
    plan = _plan(samples, config)
    out, state = Path(out_dir), Path(out_dir) / "state"
    # latencies of two machines or two versions of torch must not end up in one table
    identity = {"cpu": cpu_name(), "torch": torch.__version__}
    left_out = {"exp_json", "detrend"} | ({"clock"} if config.clock == "wall" else set())
    claim(state / "config.json", identity | {k: v for k, v in asdict(config).items() if k not in left_out})
    with one_thread():
        with appended(state / "measured-0.jsonl") as log:
            measure(model, plan, log, plan.done(read_logs(state)))
        _write(out, config, model.model, samples, plan, read_logs(state))
    return out


def _plan(samples: Sequence[Scenes], config: ElasticProfileConfig) -> Plan:
    """The plan that measures each scene under each configuration."""
    items = tuple(
        VQAItem(str(i), torch.from_numpy(s.images), question_of(s), (" ".join(to_words(s.answers[0])),))
        for i, s in enumerate(samples)
    )
    prompts = tuple(torch.from_numpy(s.prompts) for s in samples)
    contents = tuple(f"{config.seed}/{item.id}" for item in items)  # a scene depends on seed and number alone
    configurations = tuple(c._asdict() for c in config.configurations)
    how: dict[str, Any] = {"seed": config.seed, "warm_up": _WARM_UP_ROUNDS, "clock": config.clock}
    return Plan(items, prompts, contents, configurations, config.repeats, **how)


def _write(
    out: Path, config: ElasticProfileConfig, model: ElasticVLM, samples: Sequence[Scenes], plan: Plan, log: pl.DataFrame
) -> None:
    """Write everything that a run leaves in ``out``, each file whole or not at all."""
    log = without_drift(plan, log) if config.detrend else log
    right = [item.answers[0] for item in plan.items]
    cells = cells_of(plan, log, lambda i, text: float(text == right[i]))
    soft = [share_of_right(text.split(), right[i].split()) for i, text in cells.select("sample", "pred").iter_rows()]
    cells = cells.with_columns(pl.Series("soft_score", soft, dtype=pl.Float32).round(4))
    records = long_records(plan, cells, DATASET).drop("question_id")
    records = records.with_columns(pl.col("sample_id", *KNOBS).cast(pl.Int32), pl.col("accuracy").cast(pl.Float32))
    records = measurements_of(plan, log, records)
    _write_table(out / "table.parquet", records)
    _write_features(out / "features.npz", model, samples)
    # what each sample is, for studying results
    about_samples = {
        "sample_id": range(len(samples)),
        "question_type": [s.questions[0] for s in samples],
        "question": [item.question for item in plan.items],
        "answer": right,
        "rows": [s.images.shape[2] // CELL for s in samples],
        "columns": [s.images.shape[3] // CELL for s in samples],
    }
    write_table(out / "samples.parquet", pl.DataFrame(about_samples))
    about = _about(out, config, model, samples, plan, log, _rounded(cells))
    if config.exp_json:
        metadata = {"split": "held-out", **{key: about[key] for key in ("model", "machine", "torch", "command")}}
        write_exp_files(out, _rounded(records), KNOBS, metadata)
    write_json(out / "profile.json", about)


def _write_table(path: Path, records: pl.DataFrame) -> None:
    """Write every latency; of the other times their medians, in the first row of each cell, since the file that comes
    with knobwise has to be small."""
    keys = ["sample_id", *KNOBS]
    if "repeat" in records.columns:
        medians = pl.col("cpu_ms", "prefill_ms").median().over(keys)
        records = records.with_columns(pl.when(pl.col("repeat") == 0).then(medians))
        keys.append("repeat")
    measured = ("accuracy", "soft_score", "latency_ms", "cpu_ms", "prefill_ms")
    write_table(path, _rounded(records).select(*keys, *measured, "dataset"))


def _rounded(frame: pl.DataFrame) -> pl.DataFrame:
    """Times in 4 significant digits, which compress well; measurements of the same cell differ by far more."""
    times = ("latency_ms", "cpu_ms", "prefill_ms", "decode_ms")
    return frame.with_columns(pl.col(c).round_sig_figs(4).cast(pl.Float32) for c in times)


def _about(
    out: Path,
    config: ElasticProfileConfig,
    model: ElasticVLM,
    samples: Sequence[Scenes],
    plan: Plan,
    log: pl.DataFrame,
    cells: pl.DataFrame,
) -> dict[str, Any]:
    """The content of profile.json: what was measured, how and where."""
    ratio = (cells["latency_ms"] / cells["cpu_ms"]).to_numpy()
    # how quiet the machine was: 1 where nothing else ran on the core
    quiet = np.quantile(ratio, [0.5, 0.95]).round(3).tolist() if config.clock == "wall" else None
    return {
        "name": DATASET,
        "model": "elastic vision-language model, see knobwise.profiling.elastic.model",
        "parameters": sum(p.numel() for p in model.parameters()),
        "drop_order": list(model.drop_order),
        "command": command(config),
        "config": asdict(config),
        "samples": len(samples),
        "configurations": len(plan.configurations),
        "machine": {"cpu": cpu_name(), "architecture": platform.machine(), "python": platform.python_version()},
        "torch": {"version": torch.__version__, "threads": 1, "device": "cpu", "dtype": "float32", "batch_size": 1},
        "clock": {
            "latency_ms": CLOCK_NAMES[config.clock],
            "cpu_ms": CLOCK_NAMES["cpu"],
            "statistic": f"median of {config.repeats}, rounded to 4 significant digits",
            "drift": f"divided out, by the running median of {WINDOW}" if config.detrend else "left in",
            **steadiness(plan, log),
            "repeats_that_changed_an_answer": int(cells["changed"].sum()),
            "wall_over_cpu_p50_p95": quiet,
        },
        "features_ms": features_ms(plan, log),
        "cost_cpu_s": {
            "measuring": round(float(plan.select(log)["extra.cpu_ms"].sum()) / 1e3, 1),
        },
        "sha256": digests(out, ("table.parquet", "features.npz", "samples.parquet")),
    }


def _write_features(path: Path, model: ElasticVLM, samples: Sequence[Scenes]) -> None:
    """Write ``sample_id``, ``image_features`` [N, 2·width] and ``language_features`` [N, width] in half precision."""
    rows = [model.features(torch.from_numpy(s.images), torch.from_numpy(s.prompts)) for s in samples]
    image, language = (torch.cat(part).half().numpy() for part in zip(*rows, strict=True))
    with written_whole(path) as temporary, temporary.open("wb") as file:
        ids = np.arange(len(samples), dtype=np.int32)
        np.savez_compressed(file, sample_id=ids, image_features=image, language_features=language)


def command(config: ElasticProfileConfig) -> str:
    """The command that measures this profile again: every setting that is not the default, as key=value."""
    return " ".join(["knobwise profile model=elastic out=DIR", *changed_settings("elastic.", config)])
