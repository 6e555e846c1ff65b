"""Profile RapidOCR on scenes. It can be interrupted at any time.

profile_ocr("out")  →  out/table.safetensors  profile.json  state/…  (to resume from)

Each step of a scene (a detection, a box cut out, classified, read) is timed once, and the answers
of all configurations are composed from these steps, which gives the same answers and nearly the
times of answers straight through.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.profiling.measuring.adaptive_model import Request, check_configuration, clocked_by
from knobwise.profiling.measuring.machine import claim, digests, machine, write_json
from knobwise.profiling.measuring.measuring import appended, collected_between
from knobwise.profiling.measuring.outputs import CLOCK_NAMES, WINDOW
from knobwise.profiling.measuring.settings import changed_settings
from knobwise.profiling.ocr.adapter import FIRST_SIDE, RapidOCRModel
from knobwise.profiling.ocr.scenes import SEED, Scenes
from knobwise.profiling.ocr.settings import OCRProfileConfig

_Dicts = list[dict[str, Any]]
_STRAIGHT = 3
"""Configurations under which a scene is answered straight through."""
STRAIGHT_EVERY = 20
"""One scene in this many is answered straight through as well, to check the composed times and
answers."""


def profile_ocr(out_dir: str | Path, config: OCRProfileConfig | None = None) -> Path:
    """Measure scenes under every configuration, write the profile, and return its folder.

    Repeat the call to resume it. Raises InputError: RapidOCR is not installed, a value that a knob
    does not take, another run in `out_dir`.
    """
    config = config or OCRProfileConfig()
    model = RapidOCRModel()
    out = Path(out_dir)
    state = Path(out_dir) / "state"
    values = itertools.product(config.side, config.boxes, config.passes)
    names = [knob.name for knob in model.knobs]
    grid = [
        check_configuration(model.knobs, dict(zip(names, setting, strict=True)))
        for setting in values
    ]
    packages = ("rapidocr", "onnxruntime", "opencv-python-headless", "numpy")
    about = {
        "machine": machine() | {"threads": 1},
        "versions": {name: version(name) for name in packages},
    }
    claim(state / "config.json", about | asdict(config) | {"samples": None})
    with (
        appended(state / "measured.jsonl") as log,
        clocked_by(config.clock),
        collected_between() as collect,
    ):
        log.seek(0)
        try:
            lines = {line["scene"]: line for line in map(orjson.loads, log)}
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{log.name}: is damaged ({error}); move it away to measure again"
            ) from error
        missing = [row for row in range(config.samples) if row not in lines]
        with progress("measuring", config.samples, config.samples - len(missing)) as tick:
            for line in _measured(model, grid, missing):
                log.write(
                    orjson.dumps(
                        line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
                    )
                )
                lines[line["scene"]] = line
                collect()
                tick(sum(row < config.samples for row in lines), "")
    measured = [line for row, line in lines.items() if row < config.samples]
    _write(
        out,
        measured,
        grid,
        config,
        about | {"model": f"{model.name}, with the weights in its wheel"},
    )
    return out


def _measured(model: RapidOCRModel, grid: _Dicts, rows: list[int]) -> Iterator[dict[str, Any]]:
    """What is written down of each of these scenes. Configurations come in random order."""
    scenes = Scenes()
    warm_up = [model.first_stage(scenes.request(str(row))) for row in rows[:1]]
    for setting in grid:
        model.answer(warm_up, setting)
    for row in rows:
        scene = scenes[row]
        stage = model.first_stage(Request(scene.image, scene.question))
        answers: list[Any] = [None] * len(grid)
        order = np.random.default_rng((SEED, row)).permutation(len(grid)).tolist()
        for c in order:
            with model.set_knobs(grid[c]):
                answers[c] = model.answer_from(stage.kept)
        straight = []
        for c in order[:_STRAIGHT] if row % STRAIGHT_EVERY == 0 else ():
            (answer,) = model.answer([model.first_stage(stage.request)], grid[c])
            same = answer.text == answers[c].text
            straight.append(
                {"configuration": c, "same": same, "ratio": answer.total_ms / answers[c].total_ms}
            )
        yield {
            "scene": row,
            "kind": scene.kind,
            "accuracy": [round(scenes.score(str(row), answer.text), 4) for answer in answers],
            "total_ms": [round(answer.total_ms, 3) for answer in answers],
            "unused_ms": [round(stage.unused_ms(setting), 3) for setting in grid],
            "features_ms": round(stage.extra_ms, 4),
            "detector_ms": stage.kept.results["detect", FIRST_SIDE][1],
            "features": {name: block.tolist() for name, block in stage.features.items()},
            "straight": straight,
        }


def _write(
    out: Path, measured: _Dicts, grid: _Dicts, config: OCRProfileConfig, about: dict[str, Any]
) -> None:
    """Write the table and, last, `profile.json`, from lines in the order that they were measured
    in."""
    # how much slower than usual the machine was at each moment: the first detection is the same
    # work for every scene
    level = pl.Series([line["detector_ms"] for line in measured]).rolling_median(
        WINDOW, min_samples=1, center=True
    )
    slowness = (level / level.median()).to_numpy()
    order = np.argsort([line["scene"] for line in measured])
    measured = [measured[i] for i in order]
    slowness = slowness[order]
    table = _table(measured, slowness, grid, config)
    table.save(out / "table.safetensors")
    checks = [check for line in measured for check in line["straight"]]
    ratios = np.array([check["ratio"] for check in checks])
    content = {
        "name": "ocr",
        "command": " ".join(
            ["knobwise profile model=ocr out=DIR", *changed_settings("ocr.", config)]
        ),
        "config": asdict(config),
        "seed": SEED,
        "samples": len(measured),
        "configurations": len(grid),
        **about,
        "clock": {
            "latency_ms": f"{CLOCK_NAMES[config.clock]}; composed of steps that "
            "were timed once for each scene",
            "drift": f"divided out, by the running median over {WINDOW} "
            "scenes of the first detection",
            "slowness_p5_p50_p95": np.quantile(slowness, (0.05, 0.5, 0.95)).round(3).tolist(),
        },
        "composition": {
            "scenes": sum(bool(line["straight"]) for line in measured),
            "straight_answers": len(checks),
            "same_text": round(float(np.mean([check["same"] for check in checks])), 4),
            "median_relative_error": round(float(np.median(np.abs(ratios - 1))), 4),
            "median_ratio": round(float(np.median(ratios)), 4),
        },
        "features_ms": table.features_ms,
        "first_look_ms": round(float(np.median([max(line["unused_ms"]) for line in measured])), 2),
        "sha256": digests(out, ("table.safetensors",)),
    }
    write_json(out / "profile.json", content)


def _table(
    measured: _Dicts, slowness: NDArray[np.float64], grid: _Dicts, config: OCRProfileConfig
) -> ProfileTable:
    """Times divided by the slowness [N] of the machine; the first look is added where it is not
    reused."""
    look_ms = np.array([line["unused_ms"] for line in measured]) / slowness[:, None]
    latency_ms = np.array([line["total_ms"] for line in measured]) / slowness[:, None] + look_ms
    knobs = tuple(Knob(name, tuple(sorted(getattr(config, name)))) for name in grid[0])
    places = [[knob.values.index(setting[knob.name]) for knob in knobs] for setting in grid]
    return ProfileTable(
        name="ocr",
        knobs=knobs,
        configurations=torch.tensor(places),
        accuracy=_tensor([line["accuracy"] for line in measured]),
        latency_ms=_tensor(latency_ms),
        mask=torch.ones(latency_ms.shape, dtype=torch.bool),
        sample_ids=tuple(map(str, range(len(measured)))),
        features={
            name: _tensor([line["features"][name] for line in measured])
            for name in measured[0]["features"]
        },
        question_types=tuple(line["kind"] for line in measured),
        features_ms=round(float(np.median([line["features_ms"] for line in measured])), 4),
        first_look_ms=_tensor(look_ms),
    )


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float32))
