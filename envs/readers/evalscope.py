"""Output folders of evalscope: the times in `predictions/MODEL/`, the scores in `reviews/MODEL/`.

Read from files of version 1.14.1 and from its source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import yaml  # type: ignore[import-untyped]

from knobwise.common.errors import InputError
from knobwise.envs.readers.raw_files import json_lines_in
from knobwise.envs.readers.tool_rows import (
    FAILED,
    ToolRows,
    counted_by_setting,
    known_before,
    that_vary,
)

TOOL = "evalscope"
PREDICTIONS = "predictions"
REVIEWS = "reviews"
SCORE = "sample_score.score.value."
TIME = "model_output.time"
TOKENS = "model_output.usage.total_tokens"
GENERATION = "generation_config."
METADATA = "metadata."
UNSET = "unset"
"""The value of a setting that another run has alone."""
ID = "metadata.id"


def is_output_folder(folder: Path) -> bool:
    """Return whether a folder is one of the output of evalscope."""
    return all((folder / name).is_dir() for name in (PREDICTIONS, REVIEWS))


def read_evalscope(paths: Sequence[Path], notes: list[str]) -> ToolRows:
    """Return one row per answer: knobs `model` and what `generation_config` says, a column for each
    score, `model_output.time`, and what is known of the sample.

    The `index` of a row counts answers, so with `--repeats` it is no sample's: that is
    `metadata.id`, or the group of the answer where the data set has no ids.

    Raises:
        InputError: a folder holds no answers, or a file is damaged.
    """
    records = []
    for number, path in enumerate(paths):
        generation = _settings(path)
        for file in sorted((path / PREDICTIONS).rglob("*.jsonl")):
            model = str(file.parent.relative_to(path / PREDICTIONS))
            reviews = path / REVIEWS / file.relative_to(path / PREDICTIONS)
            place = {"run": number, "model": model, "task": file.stem, **generation}
            records += [place | record for record in _answers(file, reviews)]
    if not records:
        raise InputError(f"{paths[0]}: no answers in {PREDICTIONS}/MODEL/*.jsonl")
    frame = pl.DataFrame(records, infer_schema_length=None, strict=False)
    knobs = ["model", *(name for name in frame.columns if name.startswith(GENERATION))]
    frame = frame.with_columns(pl.col(knobs).cast(pl.String).fill_null(UNSET))
    frame = _with_ids(frame)
    if frame["task"].n_unique() > 1:
        frame = frame.with_columns(pl.col("task").alias("dataset"))
    _note_missing(frame, that_vary(frame, knobs), notes)
    known = known_before(frame.drop(ID, strict=False).columns, METADATA, notes)
    main = frame["main score"].drop_nulls().unique().to_list()
    scores = [name for name in frame.columns if name.startswith(SCORE)]
    if len(main) == 1 and f"{SCORE}{main[0]}" in scores:
        scores = [f"{SCORE}{main[0]}"]
    return ToolRows(
        TOOL,
        frame,
        knobs=knobs,
        accuracies=scores,
        latency=TIME,
        units={TIME: "s", TOKENS: "tokens"},
        features=["messages", *known],
        repeat=["run", "generation"],
    )


def _settings(path: Path) -> dict[str, Any]:
    """Return how answers of a run are generated, from the settings that it saved; {} without."""
    files = sorted((path / "configs").glob("task_config*.yaml"))
    if not files:
        return {}
    try:
        config = yaml.safe_load(files[-1].read_bytes())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{files[-1]}: cannot be read ({error})") from error
    generation = config.get("generation_config") if isinstance(config, dict) else None
    return {
        f"{GENERATION}{name}": json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in (generation or {}).items()
        if value is not None
    }


def _answers(predictions: Path, reviews: Path) -> list[dict[str, Any]]:
    """Return a row for each answer in a file of predictions, with its score if there is one.

    Raises:
        InputError: a row is damaged.
    """
    scores = {}
    if reviews.is_file():
        for row in json_lines_in(reviews):
            scores[_index(row, reviews)] = row.get("sample_score") or {}
    # generations of a sample stand side by side
    repeats = 1 + max((each.get("generation_index") or 0 for each in scores.values()), default=0)
    records = []
    for row in json_lines_in(predictions):
        index = _index(row, predictions)
        output = row.get("model_output") or {}
        judged = scores.get(index, {})
        score = judged.get("score") or {}
        metadata = row.get("metadata") or judged.get("sample_metadata") or {}
        group = judged.get("group_id")
        records.append(
            {
                "index": index,
                "group": str(index // repeats if group is None else group),
                "generation": index % repeats,
                "main score": score.get("main_score_name"),
                TIME: output.get("time"),
                TOKENS: (output.get("usage") or {}).get("total_tokens"),
                FAILED: bool(output.get("error")),
                "messages": _messages_before_answer(row.get("messages")),
                **{f"{SCORE}{name}": value for name, value in (score.get("value") or {}).items()},
                **{
                    f"{METADATA}{name}": value
                    for name, value in metadata.items()
                    if not isinstance(value, (dict, list))
                },
            }
        )
    return records


def _index(row: Any, path: Path) -> int:
    """Return the number of an answer. Raises InputError if a row has none."""
    index = row.get("index") if isinstance(row, dict) else None
    if not isinstance(index, int):
        raise InputError(f"{path}: a row has no index; is it a file of evalscope?")
    return index


def _messages_before_answer(messages: Any) -> str | None:
    """Return the messages before the first answer, as JSON, or None where there are none."""
    messages_before = []
    for message in messages or ():
        if message.get("role") == "assistant":
            break
        messages_before.append({"role": message.get("role"), "content": message.get("content")})
    return json.dumps(messages_before, ensure_ascii=False) if messages_before else None


def _with_ids(frame: pl.DataFrame) -> pl.DataFrame:
    """Return rows with `sample_id`: the id that the data set gave if it tells groups of answers
    apart, else the number of the group."""
    ids = pl.col("group")
    if ID in frame.columns and not frame[ID].null_count():
        pairs = frame.select("task", "group", ID).n_unique()
        if pairs == frame.select("task", ID).n_unique() == frame.select("task", "group").n_unique():
            ids = pl.col(ID).cast(pl.String)
    return frame.with_columns(ids.alias("sample_id"))


def _note_missing(frame: pl.DataFrame, knobs: Sequence[str], notes: list[str]) -> None:
    """Note answers that other settings have and one lacks: evalscope writes no row for a request
    that failed, and leaves it out of its own score."""
    settings = frame.select(knobs).unique(maintain_order=True)
    answers = frame.select("task", "sample_id", "generation").unique(maintain_order=True)
    wanted = settings.join(answers, how="cross")
    missing = wanted.join(frame, on=wanted.columns, how="anti")
    if len(missing):
        notes.append(
            f"{len(missing)} of {len(wanted)} answers have no row "
            f"({counted_by_setting(missing, knobs)}): {TOOL} writes none for a request that "
            "failed, and leaves it out of its own score, so that the setting which fails most "
            "looks best; they are not profiled"
        )
