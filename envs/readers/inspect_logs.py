"""Logs of inspect-ai (`.eval` and `.json`), and the data frames that its `samples_df` makes.

Read from files of version 0.3.285 and from its documented fields.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError
from knobwise.common.files import check_unpacked, most_unpacked
from knobwise.common.json_text import decode_json
from knobwise.common.zstd_frames import BLOCK, most_unpacked_from
from knobwise.envs.readers.raw_files import beginning, json_in
from knobwise.envs.readers.tool_rows import (
    CACHED,
    FAILED,
    ToolRows,
    counted_by_setting,
    known_before,
    that_vary,
    without_cached,
)

TOOL = "inspect-ai"
BEGINS = re.compile(r'\{\s*"version":\s*\d+,\s*"status":\s*"\w+",\s*"eval":')
"""How a log of JSON begins."""
ZIPPED = ".eval"
"""The suffix of the other logs."""
NEEDED = {"id", "epoch"}
"""What each sample has."""
FRAME = {"sample_id", "eval_id", "log", "id", "epoch"}
"""Columns that `samples_df` always makes."""
SCORE = "score_"
METADATA = "metadata_"
WORDS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""What words count as a score, as inspect-ai's `value_to_float` has it: correct, incorrect, partial
and no answer; the others in any case."""
LIMITS = ("message_limit", "token_limit", "turn_limit", "time_limit", "working_limit")
IN_FRAMES = (
    *("model", "model_generate_config", "model_roles", "solver", "solver_args"),
    *LIMITS,
)
"""Columns of a data frame that hold settings; its `model_args` holds the URL instead."""
UNSET = "unset"
"""The value of a setting that another log has alone."""
CUT = "...\n(content truncated)"
"""How inspect-ai ends a text that it has cut in a summary."""
UNITS = {"total_time": "s", "working_time": "s", "total_tokens": "tokens"}
LONG_WAIT = 1.5
"""A sample waited if its `total_time` is so many times its `working_time`."""
MANY_WAITED = 0.05
"""A larger share of the samples of any setting is worth a note."""
ZSTD = 93
"""The number of this compression in zip archives, which Python reads from version 3.14 on."""
LOCAL_HEADER = 30
"""Bytes before the name of a member of a zip archive."""


def logs_in(folder: Path) -> list[Path]:
    """Return the logs of inspect-ai in a folder, by name."""
    documents = (path for path in folder.glob("*.json") if BEGINS.match(beginning(path)))
    return sorted([*folder.glob(f"*{ZIPPED}"), *documents])


def read_inspect_logs(paths: Sequence[Path], notes: list[str]) -> ToolRows:
    """Return one row per sample and epoch of each log: all settings of its evaluation, a column
    `score_NAME` for each scorer, `total_time`, and what is known of the sample.

    Raises:
        InputError: a file is damaged or no log, or holds no samples.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += logs_in(path)
        else:
            files.append(path)
    logs = [_log(path) for path in files]
    settings = [_settings(header) for header, _ in logs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    retried = _failed_and_retried(logs)
    records = []
    known = set()
    copies = 0
    for path, (header, samples), each in zip(files, logs, settings, strict=True):
        if header.get("status") != "success":
            notes.append(f"{path.name}: its status is {header.get('status')}, not success")
        # a summary has no events
        if _uses_cache(header) and not any("events" in sample for sample in samples):
            notes.append(
                f"{path.name}: run with inspect's cache. Answers that came from it have not the "
                "model's times, and only whole samples say which these are: read the log as JSON "
                "(inspect log convert --to json), or run it again without the cache"
            )
        for sample in samples:
            # a log that was continued holds samples of the one before
            if sample.get("uuid") and sample["uuid"] in known:
                copies += 1
                continue
            known.add(sample.get("uuid"))
            if sample.get("uuid") in retried:
                continue
            values = {name: _scalar(each.get(name, UNSET)) for name in names}
            records.append(_record(header["eval"], sample) | values)
    if not records:
        raise InputError("the logs hold no samples; run inspect eval with log_samples=true")
    if copies:
        notes.append(f"{copies} samples stand in an earlier log already: read once")
    if retried:
        notes.append(f"{len(retried)} attempts failed and were retried: the last one counts")
    cut = sum(str(record["input"]).endswith(CUT) for record in records)
    if cut:
        notes.append(
            f"{cut} inputs are longer than the summaries of a .eval hold, and cut; read the log as "
            "JSON (inspect log convert --to json) to have them whole"
        )
    frame = pl.DataFrame(_columns(records), strict=False)
    advice = "inspect eval without a cache asks the model each time"
    frame = without_cached(frame, names, TOOL, advice, notes)
    return _tool_rows(frame, names, ["eval_id", "epoch"], notes)


def _failed_and_retried(logs: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> set[str]:
    """Return the uuids of the samples that failed, and which a later log of the same task has again
    under another: `inspect eval-retry` keeps the task's id, and copies what did not fail."""
    last: dict[tuple[str, str, str], dict[str, Any]] = {}
    retried = set()
    for header, samples in sorted(logs, key=lambda log: str(log[0]["eval"].get("created"))):
        task = header["eval"].get("task_id")
        for sample in samples:
            if not (task and sample.get("uuid")):
                continue
            key = str(task), str(sample["id"]), str(sample["epoch"])
            before = last.get(key, sample)
            if before.get("error") and before["uuid"] != sample["uuid"]:
                retried.add(str(before["uuid"]))
            last[key] = sample
    return retried


def inspect_frame(frame: pl.DataFrame, notes: list[str]) -> ToolRows:
    """Return the rows of a data frame of inspect-ai.

    Its `sample_id` is random in each row; a sample is told by `id`. Only columns that somebody
    asked for hold settings, so runs (`eval_id`) that look alike there may still differ in some.
    """
    frame = frame.drop("sample_id").with_columns(pl.col("id").cast(pl.String).alias("sample_id"))
    settings = [c for c in frame.columns if c in IN_FRAMES or c.startswith("task_arg_")]
    frame = frame.with_columns(pl.col(settings).cast(pl.String).fill_null(UNSET))
    frame = frame.rename({"task_name": "task"}, strict=False)
    runs = frame.select("eval_id", *settings, pl.col("^task$")).unique(maintain_order=True)
    others = runs.drop("eval_id")
    alike = len(runs) - (others.n_unique() if others.width else 1)
    if alike:
        note = (
            f"{len(runs)} runs (eval_id) have {len(runs) - alike} settings in this data frame, "
            "which lacks what some of them were set to: each run is a setting of its own. "
            "profile.path=LOGS reads the logs, where the settings stand"
        )
        if "model" in settings:
            note += "; profile.knobs=[model] takes runs of a model for repeats"
        notes.append(note)
        settings.append("eval_id")
    scores = [name for name in frame.columns if name.startswith(SCORE)]
    judged = [
        pl.Series(name, [_number(value) for value in frame[name]], pl.Float64) for name in scores
    ]
    failed = pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)
    if "error" in frame.columns:
        failed = frame["error"].cast(pl.String).fill_null("").str.strip_chars() != ""
    frame = frame.with_columns(*judged, failed.alias(FAILED))
    return _tool_rows(frame, settings, ["eval_id", "epoch"], notes)


def _tool_rows(
    frame: pl.DataFrame, settings: Sequence[str], repeat: Sequence[str], notes: list[str]
) -> ToolRows:
    """Return the rows with what their columns are; several tasks are several data sets."""
    if "task" in frame.columns and frame["task"].n_unique() > 1:
        frame = frame.with_columns(pl.col("task").alias("dataset"))
    _note_waits(frame, that_vary(frame, settings or ["eval_id"]), notes)
    scores = [
        name
        for name in frame.columns
        if name.startswith(SCORE) and frame[name].null_count() < len(frame)
    ]
    return ToolRows(
        TOOL,
        frame,
        knobs=settings or ["eval_id"],
        accuracies=scores,
        latency="total_time",
        units=UNITS,
        features=["input", *known_before(frame.columns, METADATA, notes)],
        repeat=repeat,
    )


def _note_waits(frame: pl.DataFrame, knobs: Sequence[str], notes: list[str]) -> None:
    """Note samples whose `total_time` is mostly a wait, and those of which a failed attempt is not
    in their times."""
    if {"total_time", "working_time"} <= {*frame.columns}:
        total, working = (pl.col(name).cast(pl.Float64) for name in ("total_time", "working_time"))
        has_waited = (total > LONG_WAIT * working).fill_null(False)
        # of one setting, in which a few samples of many settings may all be
        shares = frame.group_by(list(knobs)).agg(has_waited.mean().alias("share"))["share"]
        if shares.gt(MANY_WAITED).any():
            waited = frame.filter(has_waited)
            notes.append(
                f"{len(waited)} samples took more than {LONG_WAIT:g} times their working_time "
                f"({counted_by_setting(waited, knobs)}): total_time holds waits, such as those "
                "for a rate limit or a connection; profile.latency=working_time leaves them out"
            )
    if "retries" in frame.columns:
        retried = frame.filter(pl.col("retries").cast(pl.Float64).fill_null(0.0) > 0)
        if len(retried):
            notes.append(
                f"{len(retried)} samples failed and were retried within their run "
                f"({counted_by_setting(retried, knobs)}): their times are those of the last "
                "attempt alone"
            )


def _record(about: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a sample; names are those of inspect-ai's own data frames."""
    usage = (sample.get("model_usage") or {}).values()
    error = sample.get("error")
    if isinstance(error, dict):
        error = error.get("message")
    limit = sample.get("limit")
    if isinstance(limit, dict):
        limit = limit.get("type")
    record: dict[str, Any] = {
        "sample_id": str(sample["id"]),
        "id": str(sample["id"]),
        "epoch": sample["epoch"],
        "eval_id": about.get("eval_id"),
        "task": str(about.get("task")).rpartition("/")[2],
        "input": _scalar(sample.get("input")),
        "total_time": sample.get("total_time"),
        "working_time": sample.get("working_time"),
        "total_tokens": sum(each.get("total_tokens") or 0 for each in usage),
        "error": error,
        "limit": limit,
        # a summary counts them, a whole sample lists them
        "retries": sample.get("retries") or len(sample.get("error_retries") or ()),
        FAILED: bool(error),
        CACHED: any(
            isinstance(event, dict) and event.get("cache") == "read"
            for event in sample.get("events") or ()
        ),
    }
    for name, value in (sample.get("metadata") or {}).items():
        record[f"{METADATA}{name}"] = _scalar(value)
    for name, score in (sample.get("scores") or {}).items():
        value = score.get("value")
        values = value if isinstance(value, dict) else {"": value}
        for part, each in values.items():
            record[f"{SCORE}{name}{'.' * bool(part)}{part}"] = _number(each)
    return record


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of rows; one that mixes numbers with words is text."""
    columns = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        kinds = {type(value) for value in values if value is not None}
        if len(kinds) > 1 and kinds != {int, float}:
            values = [None if value is None else str(value) for value in values]
        columns[name] = values
    return columns


def _settings(header: dict[str, Any]) -> dict[str, Any]:
    """Return what an evaluation was set to: its model, the arguments of model and task, how text is
    generated, its solver, and its limits."""
    about = header["eval"]
    plan = header.get("plan") or {}
    settings = {"model": about.get("model")}
    # what was asked of the run goes before what the model was made with
    settings |= about.get("model_generate_config") or {}
    settings |= plan.get("config") or {}
    for prefix, group in (
        ("model_args", about.get("model_args")),
        ("task_arg", about.get("task_args")),
        ("model_role", about.get("model_roles")),
    ):
        settings |= {f"{prefix}_{name}": value for name, value in (group or {}).items()}
    steps = [
        f"{step.get('solver')}({json.dumps(step.get('params_passed') or {}, sort_keys=True)})"
        for step in plan.get("steps") or ()
    ]
    settings["solver"] = " ".join(steps).replace("({})", "")
    settings |= {name: about.get("config", {}).get(name) for name in LIMITS}
    return {name: UNSET if value is None else value for name, value in settings.items()}


def _uses_cache(header: dict[str, Any]) -> bool:
    """Return whether an evaluation may have read answers from inspect's cache: how text is
    generated, or an argument of a solver, says so."""
    plan = header.get("plan") or {}
    groups = [header["eval"].get("model_generate_config"), plan.get("config")]
    for step in plan.get("steps") or ():
        groups += [step.get("params"), step.get("params_passed")]
    return any(isinstance(group, dict) and group.get("cache") for group in groups)


def _scalar(value: Any) -> Any:
    """Return a list or an object, such as a chat, as JSON; anything else as it is."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, sort_keys=isinstance(value, dict))
    return value


def _number(value: Any) -> float | None:
    """Return a score as a number, None where there is none."""
    if isinstance(value, str):
        value = value.strip()
        value = WORDS.get(value, WORDS.get(value.lower(), value))
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def _log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a log, and its samples or their summaries.

    Raises:
        InputError: it is damaged, or no log.
    """
    if path.suffix == ZIPPED:
        header, samples = _archived(path)
    else:
        header = json_in(path)
        samples = header.get("samples") or [] if isinstance(header, dict) else []
    sound = isinstance(header, dict) and isinstance(header.get("eval"), dict)
    if not sound or any(not isinstance(each, dict) or NEEDED - each.keys() for each in samples):
        raise InputError(f"{path}: not a log of inspect-ai, or damaged")
    return header, samples


def _archived(path: Path) -> tuple[Any, list[Any]]:
    """Return the header and the summaries of the samples in a `.eval`, which is a zip archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            # a run that was cut off has no header, and its summaries in parts
            header = members.get("header.json") or members["_journal/start.json"]
            parts = [members[name] for name in ("summaries.json",) if name in members]
            if not parts:
                parts = [m for name, m in members.items() if name.startswith("_journal/summaries/")]
            check_unpacked(path, sum(member.file_size for member in (header, *parts)))
            samples = []
            size = 0
            for part in parts:
                content = unpack_member(archive, part, path, size)
                size += len(content)
                samples += decode_json(content)
            return decode_json(unpack_member(archive, header, path, size)), samples
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a log of inspect-ai, or damaged ({error})") from error


def unpack_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, before: int = 0
) -> bytes:
    """Return the content of a member of an archive, which may be compressed by zstandard.

    No more is unpacked than `check_unpacked` allows, but for a block of 128 kB, whatever size the
    archive names.

    Args:
        archive, member, path: the member, and the file that the archive is in.
        before: how many bytes of the archive were unpacked already.

    Raises:
        InputError: it is compressed in a way that nobody here can read, or unpacks to too much.
        ValueError: it is damaged.
    """
    try:
        with archive.open(member) as file:
            content = file.read(most_unpacked() - before + 1)
        check_unpacked(path, before + len(content))
        return content
    except NotImplementedError:
        if member.compress_type != ZSTD:
            raise InputError(
                f"{path}: {member.filename} is compressed by method {member.compress_type}, which "
                "is not read; inspect log convert --to json writes it as JSON"
            ) from None
    with path.open("rb") as file:
        file.seek(member.header_offset)
        name, extra = struct.unpack("<HH", file.read(LOCAL_HEADER)[-4:])
        file.seek(name + extra, io.SEEK_CUR)
        packed = file.read(member.compress_size)
    check_unpacked(path, before + most_unpacked_from(packed) - BLOCK)
    try:
        # polars unpacks what it reads as text
        lines = pl.read_lines(io.BytesIO(packed)).to_series()
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{member.filename} cannot be unpacked") from error
    content = "\n".join(lines).encode()
    if len(content) + 1 == member.file_size:
        content += b"\n"
    check_unpacked(path, before + len(content))
    if zlib.crc32(content) != member.CRC:
        raise ValueError(f"{member.filename} is not what it was when it was written")
    return content
