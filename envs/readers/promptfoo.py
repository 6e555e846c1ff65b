"""Results of promptfoo: JSON lines, and the JSON document of a whole evaluation.

Read from files of version 0.123 and from its documented fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.raw_files import json_in, json_lines_in
from knobwise.envs.readers.tool_rows import (
    CACHED,
    FAILED,
    ToolRows,
    counted_by_setting,
    known_before,
    that_vary,
    without_cached,
)

BEGINS = re.compile(
    r'\{\s*"(cost|gradingResult|description|id|error)".*"namedScores"|\{\s*"evalId"', re.DOTALL
)
"""How its files begin: with a row, or with the document of an evaluation."""
NEEDED = {"promptIdx", "testIdx", "latencyMs", "provider"}
"""What each result has."""
ERROR = 2
"""`failureReason` of an answer that never came; 1 is a wrong answer."""
HELD_MS = 60_000
"""promptfoo waits so long after a rate limit that names no other time, and counts it as latency."""
UNUSUAL = 5
"""An answer that takes so many times as long as usual may have waited."""


def read_promptfoo(paths: Sequence[Path], notes: list[str]) -> ToolRows:
    """Return one row per answer: knobs `model` (the provider) and `prompt`, `score`, `latencyMs`
    and `cost`.

    Raises:
        InputError: a file holds no results, or all answers came from the cache.
    """
    rows = []
    for number, path in enumerate(paths):
        rows += [(number, row) for row in _rows(path)]
    ids, repeats = _samples(rows)
    records = []
    for (number, row), sample_id, repeat in zip(rows, ids, repeats, strict=True):
        response = row.get("response")
        records.append(
            {
                "sample_id": sample_id,
                "testIdx": row["testIdx"],
                "repeatIdx": repeat,
                "file": number,
                "promptIdx": row["promptIdx"],
                # the name of the field of a request that it would set
                "model": _provider(row["provider"]),
                "prompt": _prompt(row.get("prompt")),
                "score": row.get("score"),
                "success": row.get("success"),
                "latencyMs": row.get("latencyMs"),
                "cost": _price(row),
                FAILED: row.get("failureReason") == ERROR,
                CACHED: bool(isinstance(response, dict) and response.get("cached")),
                **{f"namedScores.{k}": v for k, v in (row.get("namedScores") or {}).items()},
                **{f"vars.{k}": _plain(v) for k, v in (row.get("vars") or {}).items()},
            }
        )
    frame = pl.DataFrame(records, infer_schema_length=None, strict=False)
    frame = _with_names_of_settings(frame, notes)
    knobs = ["model", "prompt"]
    advice = "promptfoo eval --no-cache asks the model each time"
    frame = without_cached(frame, knobs, "promptfoo", advice, notes)
    _note_held(frame, that_vary(frame, knobs), notes)
    priced = frame["cost"].cast(pl.Float64).fill_null(0.0).sum() > 0
    if priced:
        _note_unpriced(frame, that_vary(frame, knobs), notes)
    return ToolRows(
        "promptfoo",
        frame,
        knobs=knobs,
        accuracies=["score"],
        latency="latencyMs",
        units={"latencyMs": "ms", "cost": "USD"},
        features=known_before(frame.columns, "vars.", notes),
        costs=["cost"] if priced else [],
        repeat=["file", "repeatIdx"],
    )


def _rows(path: Path) -> list[Any]:
    """Return the results in a file. Raises InputError if it is none, or a result is damaged."""
    if path.name.removesuffix(".gz").endswith(".json"):
        document = json_in(path)
        results = document.get("results") if isinstance(document, dict) else None
        rows = results.get("results") if isinstance(results, dict) else results
    else:
        rows = json_lines_in(path)
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{path}: no results of promptfoo; write them with promptfoo eval -o FILE")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not row.keys() >= NEEDED:
            raise InputError(
                f"{path}: result {number} lacks one of {', '.join(sorted(NEEDED))}, which each "
                "result of promptfoo has"
            )
    return rows


def _samples(rows: Sequence[tuple[int, Any]]) -> tuple[list[str], list[int]]:
    """Return the id of each row's sample, and which repeat of it the row is.

    `--repeat` gives each repeat a `testIdx` of its own, and another file may number other tests
    alike; what is equal is the test. A sample has the first `testIdx` of its test as its id.

    Args:
        rows: each with the number of its file.
    """
    tests: dict[str, list[tuple[int, int]]] = {}
    texts = []
    for number, row in rows:
        about = [row.get("testCase"), row.get("vars")]
        text = json.dumps(about, sort_keys=True, default=str)
        places = tests.setdefault(text, [])
        if (number, row["testIdx"]) not in places:
            places.append((number, row["testIdx"]))
        texts.append(text)
    ids: dict[str, str] = {}
    taken = set()
    for text, places in tests.items():
        places.sort()
        number, first = places[0]
        ids[text] = f"{first} of file {number + 1}" if first in taken else str(first)
        taken.add(first)
    repeats = [
        [place for place in tests[text] if place[0] == number].index((number, row["testIdx"]))
        for text, (number, row) in zip(texts, rows, strict=True)
    ]
    return [ids[text] for text in texts], repeats


def _provider(provider: Any) -> str:
    """Return the label of a provider, or its id where it has none."""
    if isinstance(provider, dict):
        return str(provider.get("label") or provider.get("id"))
    return str(provider)


def _prompt(prompt: Any) -> str:
    """Return the label of a prompt, which is the prompt itself where it has none."""
    if isinstance(prompt, dict):
        return str(prompt.get("label") or prompt.get("raw"))
    return str(prompt)


def _price(row: dict[str, Any]) -> Any:
    """Return the price of an answer, None where promptfoo knew none: it then writes 0, but its
    `response` has no cost."""
    response = row.get("response")
    known = isinstance(response, dict) and response.get("cost") is not None
    return row.get("cost") if known or row.get("cost") else None


def _note_unpriced(frame: pl.DataFrame, knobs: Sequence[str], notes: list[str]) -> None:
    """Note answers without a price, beside others that have one."""
    unpriced = frame.filter(pl.col("cost").is_null() & ~pl.col(FAILED))
    if len(unpriced):
        notes.append(
            f"{len(unpriced)} answers have no price ({counted_by_setting(unpriced, knobs)}): "
            "promptfoo knew none and wrote 0; their cost is unknown, not 0. If such a model is "
            "free, let its provider return cost 0"
        )


def _plain(value: Any) -> Any:
    """Return a variable as it is, or as JSON if it is a list or an object."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _with_names_of_settings(frame: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Return rows with different names of settings wherever `promptIdx`, the column of the grid,
    differs: providers of one name may have other options, which the file does not hold."""
    columns = frame.select("file", "promptIdx", "model", "prompt").unique(maintain_order=True)
    alike = columns.select("file", "model", "prompt").is_duplicated()
    if not alike.any():
        return frame
    names = columns.filter(alike)["model"].unique(maintain_order=True).to_list()
    notes.append(
        f"several settings have the provider {', '.join(names)} and the same prompt: they are "
        "told apart by promptIdx; give each provider a label"
    )
    numbered = pl.format("{} (promptIdx {})", "model", "promptIdx")
    model = pl.when(pl.col("model").is_in(names)).then(numbered).otherwise("model")
    return frame.with_columns(model.alias("model"))


def _note_held(frame: pl.DataFrame, knobs: Sequence[str], notes: list[str]) -> None:
    """Note answers that a rate limit seems to have held."""
    answered = frame.filter(~pl.col(FAILED))
    usual = pl.col("latencyMs").median().over(list(knobs))
    held = (pl.col("latencyMs") >= HELD_MS) & (pl.col("latencyMs") > UNUSUAL * usual)
    waited = answered.filter(held)
    if len(waited):
        notes.append(
            f"{len(waited)} answers took a minute and more, {UNUSUAL} times as long as usual "
            f"({counted_by_setting(waited, knobs)}): promptfoo counts its wait after a rate limit "
            "as latency; if that is so, measure them again with -j 1 or --delay"
        )
