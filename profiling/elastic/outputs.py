"""Write a measured profile: the long table, the features, what was measured where, and exp5/exp6 files."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from knobwise.common.files import written_whole
from knobwise.envs.readers.exp_files import write_exp5_exp6
from knobwise.profiling.elastic.measuring import Measurements
from knobwise.profiling.elastic.model import OVERVIEW_TOKENS, TILE_TOKENS, Configuration, ElasticVLM, tile_grid
from knobwise.profiling.elastic.scenes import (
    CELL,
    FILLER,
    PROMPT_TOKENS,
    QUESTIONS,
    WORDS,
    Scenes,
    soft_score,
    to_words,
)
from knobwise.profiling.measuring.figures import profile_figures

if TYPE_CHECKING:
    from knobwise.profiling.elastic.profile import ElasticProfileConfig

DATASET = "elastic_scenes"
_MEASURED = ("accuracy", "soft_score", "latency_ms", "cpu_ms", "prefill_ms")


def write_profile(
    out: Path, config: ElasticProfileConfig, model: ElasticVLM, samples: Sequence[Scenes], measured: Measurements
) -> dict[str, Any]:
    """Write everything that a run leaves in ``out``, each file whole or not at all; return the description."""
    configurations = config.configurations
    exact, soft = score(samples, measured.tokens)
    times = {name: np.median(getattr(measured, name), 0) for name in ("total_ms", "prefill_ms", "cpu_ms")}
    records = long_records(configurations, samples, measured.tokens, exact, soft, times)
    with written_whole(out / "table.parquet") as path:
        records.select("sample_id", *Configuration._fields, *_MEASURED, "dataset").write_parquet(
            path, compression="zstd", compression_level=19
        )
    write_features(out / "features.npz", model, samples)
    write_samples(out / "samples.parquet", samples)
    knob_values = np.array(configurations)
    digests = {name: _digest(out / name) for name in ("table.parquet", "features.npz", "samples.parquet")}
    spread = np.log(measured.total_ms).std(0, ddof=1).mean() if config.repeats > 1 else np.nan
    about = {
        "name": DATASET,
        "model": "elastic vision-language model, see knobwise.profiling.elastic.model",
        "parameters": sum(p.numel() for p in model.parameters()),
        "drop_order": list(model.drop_order),
        "command": command(config),
        "config": asdict(config),
        "samples": len(samples),
        "configurations": len(configurations),
        "machine": {"cpu": cpu_name(), "architecture": platform.machine(), "python": platform.python_version()},
        "torch": {"version": torch.__version__, "threads": 1, "device": "cpu", "dtype": "float32", "batch_size": 1},
        "clock": {
            "latency_ms": f"wall, time.perf_counter ({time.get_clock_info('perf_counter').implementation})",
            "cpu_ms": f"thread CPU, time.thread_time ({time.get_clock_info('thread_time').implementation})",
            "statistic": f"median of {config.repeats}, rounded to 4 significant digits",
            "log_spread_of_one_measurement": None if np.isnan(spread) else round(float(spread), 4),
            "repeats_that_changed_an_answer": int(measured.changed[0]),
            # how quiet the machine was: 1 where nothing else ran on the core
            "wall_over_cpu_p50_p95": np.quantile(times["total_ms"] / times["cpu_ms"], [0.5, 0.95]).round(3).tolist(),
        },
        "cost_cpu_s": {
            "training": round(model.training_s, 1),
            "measuring": round(float(np.sum(measured.cpu_ms)) / 1e3, 1),
        },
        "figures": profile_figures(exact, times["total_ms"], knob_values, Configuration._fields),
        "figures_soft_score": profile_figures(soft, times["total_ms"], knob_values, Configuration._fields),
        "questions": by_question(samples, exact, times["total_ms"], knob_values),
        "sha256": digests,
    }
    if config.exp_json:
        metadata = {"split": "held-out", **{key: about[key] for key in ("model", "machine", "torch", "command")}}
        write_exp5_exp6(_with_words(records, samples, measured.tokens), out / "exp5", out / "exp6", DATASET, metadata)
    with written_whole(out / "profile.json") as path:
        path.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return about


def score(samples: Sequence[Scenes], tokens: NDArray[np.int8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Exact match (0 or 1) and share of right tokens, both [N, C], of decoded ``tokens`` [N, C, 9]."""
    answers = np.concatenate([s.answers for s in samples])
    exact = (tokens == answers[:, None]).all(2).astype(np.float32)
    soft = [[soft_score(said, answer) for said in row] for row, answer in zip(tokens, answers, strict=True)]
    return exact, np.array(soft, np.float32)


def long_records(
    configurations: Sequence[Configuration],
    samples: Sequence[Scenes],
    tokens: NDArray[np.int8],
    exact: NDArray[np.float32],
    soft: NDArray[np.float32],
    times: dict[str, NDArray[np.float32]],
) -> pl.DataFrame:
    """One row per (sample, configuration): knobs, scores, times in ms (four significant digits), token counts."""
    n, c = exact.shape
    knobs = np.tile(np.array(configurations, np.int32), (n, 1))
    sides = [(s.images.shape[2] // CELL, s.images.shape[3] // CELL) for s in samples]
    grids = [[tile_grid(*side, configuration.max_crops) for configuration in configurations] for side in sides]
    vision = [OVERVIEW_TOKENS + TILE_TOKENS * grid.down * grid.across for row in grids for grid in row]
    columns = {
        "sample_id": np.repeat(np.arange(n, dtype=np.int32), c),
        **{name: knobs[:, i] for i, name in enumerate(Configuration._fields)},
        "accuracy": exact.ravel(),
        "soft_score": soft.ravel().round(4),
        "latency_ms": _rounded(times["total_ms"]),
        "cpu_ms": _rounded(times["cpu_ms"]),
        "prefill_ms": _rounded(times["prefill_ms"]),
        "decode_ms": _rounded(times["total_ms"] - times["prefill_ms"]),
        "num_vision_tokens": np.array(vision, np.int32),
        "num_language_tokens": np.full(n * c, PROMPT_TOKENS, np.int32),
        "num_output_tokens": (tokens != FILLER).sum(2).ravel().astype(np.int32),
    }
    total = sum(columns[f"num_{kind}_tokens"] for kind in ("vision", "language", "output"))
    return pl.DataFrame({**columns, "num_total_tokens": total}).with_columns(dataset=pl.lit(DATASET))


def _with_words(records: pl.DataFrame, samples: Sequence[Scenes], tokens: NDArray[np.int8]) -> pl.DataFrame:
    """The records with what the model said and what is right, in words, for people who read exp5 files."""
    said = [" ".join(to_words(row)) for row in tokens.reshape(-1, tokens.shape[-1])]
    right = [[" ".join(to_words(s.answers[0]))] for s in samples for _ in range(tokens.shape[1])]
    return records.with_columns(pl.Series("pred", said), pl.Series("answers", right))


def write_features(path: Path, model: ElasticVLM, samples: Sequence[Scenes]) -> None:
    """Write ``sample_id``, ``image_features`` [N, 2·width] and ``language_features`` [N, width] in half precision."""
    rows = [model.features(torch.from_numpy(s.images), torch.from_numpy(s.prompts)) for s in samples]
    image, language = (torch.cat(part).half().numpy() for part in zip(*rows, strict=True))
    with written_whole(path) as temporary, temporary.open("wb") as file:
        ids = np.arange(len(samples), dtype=np.int32)
        np.savez_compressed(file, sample_id=ids, image_features=image, language_features=language)


def write_samples(path: Path, samples: Sequence[Scenes]) -> None:
    """Write what each sample is, for looking into results: question type and words, answer, grid size."""
    rows = [
        {
            "sample_id": i,
            "question_type": s.questions[0],
            "question": " ".join(w for w in (WORDS[t] for t in s.prompts[0]) if w[0] not in "·<"),
            "answer": " ".join(to_words(s.answers[0])),
            "rows": s.images.shape[2] // CELL,
            "columns": s.images.shape[3] // CELL,
        }
        for i, s in enumerate(samples)
    ]
    with written_whole(path) as temporary:
        pl.DataFrame(rows).write_parquet(temporary, compression="zstd", compression_level=19)


def by_question(
    samples: Sequence[Scenes], exact: NDArray[np.float32], latency_ms: NDArray[np.float32], knobs: NDArray[np.int64]
) -> dict[str, Any]:
    """Per question type: how many, accuracy over the configurations, and what each knob moves."""
    asked = np.array([s.questions[0] for s in samples])
    result = {}
    for question in QUESTIONS:
        rows = asked == question
        if rows.any():
            figures = profile_figures(exact[rows], latency_ms[rows], knobs, Configuration._fields)
            result[question] = {
                "samples": int(rows.sum()),
                "accuracy_by_configuration": figures["accuracy_by_configuration"],
                "config_dependent_share": figures["config_dependent_share"],
                "accuracy_range": {knob: effect["accuracy_range"] for knob, effect in figures["knobs"].items()},
            }
    return result


def command(config: ElasticProfileConfig) -> str:
    """The command that measures this profile again: every setting that is not the default, as key=value."""
    return " ".join(["knobwise profile model=elastic out=DIR", *_changed(config, "elastic.")])


def _changed(config: Any, prefix: str) -> list[str]:
    default = type(config)()
    words = []
    for f in fields(config):
        value, usual = getattr(config, f.name), getattr(default, f.name)
        if is_dataclass(value):
            words += _changed(value, f"{prefix}{f.name}.")
        elif value != usual:
            text = str(list(value)).replace(" ", "") if isinstance(value, tuple) else str(value)
            words.append(f"{prefix}{f.name}={text}")
    return words


def _rounded(times: NDArray[np.float32]) -> NDArray[np.float32]:
    flat = times.ravel().astype(np.float64)
    unit = 10.0 ** (np.floor(np.log10(flat.clip(min=1e-9))) - 3)
    return np.asarray(np.round(flat / unit) * unit, np.float32)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cpu_name() -> str:
    """The model name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
