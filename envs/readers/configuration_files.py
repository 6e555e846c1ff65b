"""Reading folders with one JSON file per configuration, or one file of a whole run.

Reading is strict: ids that restart on every rank, knobs that disagree with the file name, and
merges that lost samples are refused, not repaired.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.common.errors import InputError, naming
from knobwise.common.json_text import read_json
from knobwise.common.progress import progress
from knobwise.envs.readers.column_values import as_share, check_range, refuse_lost_digits

IDS = ("sample_id", "question_id", "image_id")
WORDS = (*IDS, "question_type")
"""Keys of a row that hold names; they may also stand in the row's `metadata`."""

SETTING = (
    r"_crops(?P<max_crops>\d+)_topk(?P<top_k>\d+)_blocks(?P<num_active_blocks>\d+)(_rank\d+)?\.json"
)
"""How file names end: with the configuration."""

RANK = re.compile(r"_rank\d+\.json$")
"""How the names of files of a rank end, which hold a part of the samples."""
KNOBS = ("max_crops", "top_k", "num_active_blocks")
Record = dict[str, Any]


def read_configurations(
    directory: str | Path,
    kind: str,
    dataset: str,
    keys: Sequence[str],
    columns: Mapping[str, Sequence[Sequence[str]]],
    notes: list[str],
    accuracy_unit: str = "share",
) -> tuple[pl.DataFrame, list[Record]]:
    """Read the files of one data set; rank files only serve to check their merge.

    Args:
        directory: a folder, or a file. That of a whole run is read where there are no others.
        kind: how file names begin; empty for core_exp files.
        dataset: name of the data set.
        keys: rows are under the first of these that a file has.
        columns: for each column the values of a row that it sums, each with its spellings.
        notes: what was left out is added here.
        accuracy_unit: `percent` for accuracies in [0, 100].

    Returns:
        The cells (`WORDS`, `repeat`, columns, knobs, file) and the summaries, with knobs and file.
    """
    root = Path(directory)
    folder, settings = _find_files(root, kind, dataset)
    # a merged file replaces the files of its ranks
    ranks = _by_merge(settings)
    foreign = []
    short: list[str] = []
    batched: list[str] = []
    frames: list[pl.DataFrame] = []
    summaries: list[Record] = []
    with progress(f"reading {folder.name or folder}", len(ranks), every_s=10, quiet_s=2) as tick:
        for done, (path, parts) in enumerate(ranks.items(), 1):
            tick(done)
            setting = settings[path]
            content, rows = _load(path, setting, keys)
            named = str(content["config"].get("dataset_name") or dataset)
            if named.replace("_", "-") != dataset.replace("_", "-"):
                foreign.append(named)
                # a folder with the data set's name is trusted more
                if folder == root:
                    continue
            _check_merge(path, len(rows), [len(_load(part, setting, keys)[1]) for part in parts])
            if "latency_ms" in columns and _batch_size(content) > 1:
                batched.append(path.name)
            # each rank counts the samples of all
            if _counted(content) > len(rows) > 0 and not RANK.search(path.name):
                short.append(path.name)
            if not setting:
                rows = _with_knobs(path, content["summary"], rows, notes)
            summaries += [record | setting | {"file": str(path)} for record in content["summary"]]
            frames.append(_rows_frame(path, setting, rows, columns))
    if not frames:
        raise InputError(f"{root}: no files of {dataset!r}; all name the data set {foreign[0]}")
    others = ", ".join(sorted(set(foreign)))
    read = ": not read" if folder == root else ""
    skipped = {
        "rank files not read, since files merged from them are there": len(settings) - len(ranks),
        "JSON files not read, since their names do not fit": _unread(folder, kind, settings),
        f"files that name another data set ({others}){read}": len(foreign),
        f"files with fewer rows than num_samples in their summary ({_few(short)})": len(short),
    }
    notes += [f"{folder}: {count} {what}" for what, count in skipped.items() if count]
    if batched:
        notes.append(
            f"{folder}: {len(batched)} files were measured in batches, as config.batch_size says "
            f"({_few(batched)}): their times may be those of whole batches, not of a sample"
        )
    return _checked(pl.concat(frames), folder, columns, accuracy_unit, notes), summaries


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join([*names[:most], "…"][: len(names)])


def _batch_size(content: Record) -> float:
    size = content["config"].get("batch_size")
    return size if isinstance(size, int | float) else 1


def _counted(content: Record) -> int:
    """Return how many samples the summaries of a file count."""
    counts = [record.get("num_samples") for record in (*content["summary"], content)]
    return sum(count for count in counts if isinstance(count, int))


def _checked(
    cells: pl.DataFrame,
    folder: Path,
    columns: Collection[str],
    accuracy_unit: str,
    notes: list[str],
) -> pl.DataFrame:
    """Return the cells with accuracies as shares. Raises InputError for values out of range."""
    if "accuracy" in columns:
        with naming(folder):
            cells = cells.with_columns(as_share(cells["accuracy"], accuracy_unit, notes))
    for column in columns:
        check_range(cells, column, column)
    return cells


def _unread(folder: Path, kind: str, settings: Collection[Path]) -> int:
    """Count the JSON files in a folder whose names do not fit."""
    # files of the other kind may be in the same folder
    other = {"exp5_", "exp6_"} - {kind[:5]}
    others = [path for path in folder.glob("*.json") if path.name[:5] not in other]
    return sum(p not in settings and not p.stem.endswith("_results") for p in others)


def _by_merge(paths: Collection[Path]) -> dict[Path, list[Path]]:
    """Return the rank files of each merge; a rank file without a merge stands for itself."""
    ranks: dict[Path, list[Path]] = {}
    for path in paths:
        merge = path.with_name(RANK.sub(".json", path.name))
        if merge == path or merge not in paths:
            ranks.setdefault(path, [])
        else:
            ranks.setdefault(merge, []).append(path)
    return ranks


def _check_merge(path: Path, rows: int, of_ranks: list[int]) -> None:
    whole = sum(of_ranks)
    # a distributed sampler repeats up to one sample on each rank
    if whole - rows > len(of_ranks):
        raise InputError(
            f"{path}: holds {rows} of the {whole} rows of its {len(of_ranks)} rank files: ids "
            "that restart on every rank were merged into one. Merge again under unique ids"
        )


def _find_files(root: Path, kind: str, dataset: str) -> tuple[Path, dict[Path, Record]]:
    """Find the files of a data set, in `root`, in a folder of it, or `root` itself.

    Returns:
        The folder that holds them, or the file itself; and the knobs in the name of each file,
        none for the file of a whole run. Raises InputError if there are no files.
    """
    begin = f"{kind}(_results)?"
    if not kind:
        begin = rf"{re.escape(dataset).replace('_', '[-_]')}_imgsizetier-(?P<tier>[a-z]+)"
    pattern = re.compile(begin + SETTING)
    if kind and root.is_file():
        return root, {root: _setting(pattern.fullmatch(root.name))}
    if not root.exists():
        raise InputError(f"{root}: no such folder")
    dashed = dataset.replace("_", "-")
    prefix = f"{kind}_" if kind else ""
    # the first folder with such files counts
    folders = [root / name for name in (prefix + dashed, prefix + dataset, dashed, dataset, "")]
    for folder in folders:
        paths = sorted(folder.glob("*.json"))
        if matches := {path: match for path in paths if (match := pattern.fullmatch(path.name))}:
            return folder, {path: _setting(match) for path, match in matches.items()}
        if kind and (whole := folder / f"{kind}_results.json") in paths:
            return folder, {whole: {}}
    example = f"{kind or f'{dataset}_imgsizetier-high'}_crops12_topk8_blocks16.json"
    inside = sorted(path.name.removeprefix(prefix) for path in root.iterdir() if path.is_dir())
    others = f"; it has the folders of {', '.join(inside)}" if inside else ""
    raise InputError(
        f"{root}: no {kind or 'core_exp'} files of {dataset!r} such as {example}, here or in a "
        f"folder {folders[0].name} or {dataset}{others}"
    )


def _setting(match: re.Match[str] | None) -> Record:
    """Return the knob values in the name of a file; none for the file of a whole run."""
    if not match:
        return {}
    values = match.groupdict().items()
    return {knob: int(value) if value.isdecimal() else value for knob, value in values}


def _load(path: Path, setting: Record, keys: Sequence[str]) -> tuple[Record, list[Record]]:
    """Return the content of a file and its rows.

    Raises InputError if it is not JSON of the expected form, or a knob in it differs from the
    file name.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: must hold a JSON object with {' or '.join(keys)}, holds a "
            f"{type(content).__name__}"
        )
    summary = content["summary"] = content.get("summary") or []
    content["config"] = content.get("config") or {}
    # rows may stand under several names, or be missing beside a summary
    key = next((key for key in keys if key in content), "")
    if not key and not summary:
        raise InputError(f"{path}: has none of {', '.join(keys)}; it has {', '.join(content)}")
    rows = content.get(key, [])
    if not isinstance(content["config"], dict):
        raise InputError(f"{path}: config must be an object")
    for what, records in ((key, rows), ("summary", summary), ("the file", [content])):
        if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
            raise InputError(f"{path}: {what} must hold objects")
        # every place that names a knob must agree with the file name
        for knob, value in setting.items():
            if wrong := [record[knob] for record in records if record.get(knob, value) != value]:
                raise InputError(
                    f"{path}: {what} says {knob}={wrong[0]}, the file name says {value}. Rename "
                    "or remove it"
                )
    return content, rows


def _with_knobs(
    path: Path, summary: list[Record], rows: list[Record], notes: list[str]
) -> list[Record]:
    """Return the rows of a whole run with the values of all knobs.

    Where no row has any, the first `num_samples` rows have those of the first summary, and so on.
    Raises InputError if the counts do not add up, a summary's accuracy is not the mean score of its
    rows, or a row or a summary lacks a knob.
    """
    named = rows
    if rows and not any(row.keys() & {*KNOBS} for row in rows):
        named = []
        counts = [n if type(n := record.get("num_samples")) is int else 0 for record in summary]
        fits = sum(counts) == len(rows)
        for record, count in zip(summary, counts, strict=True):
            part = rows[len(named) : len(named) + count]
            named += [row | {knob: record.get(knob) for knob in KNOBS} for row in part]
            accuracy: Any = record.get("accuracy")
            scores: list[Any] = [row.get("score") for row in part]
            if part and {*map(type, [accuracy, *scores])} <= {int, float}:
                fits &= abs(sum(scores) / count - accuracy) < 1e-3
        if not fits:
            raise InputError(
                f"{path}: its rows do not name {', '.join(KNOBS)}, and do not fit num_samples and "
                "accuracy of its summaries. Add the knobs to every row, or give a file for each "
                "configuration"
            )
        notes.append(f"{path}: its rows name no knobs; they have those of its summaries in order")
    for record in (*summary, *named):
        values = [record.get(knob) for knob in KNOBS]
        if not all(type(value) is int and value >= 0 for value in values):
            raise InputError(
                f"{path}: a row or summary has {values} for {', '.join(KNOBS)}; all must be whole "
                "numbers ≥ 0"
            )
    return named


def _rows_frame(
    path: Path,
    setting: Record,
    rows: list[Record],
    columns: Mapping[str, Sequence[Sequence[str]]],
) -> pl.DataFrame:
    """Return the rows as a frame, with the knobs of the setting, or else of each row."""
    values = {key: _row_names(path, rows, key) for key in (*WORDS, "repeat")}
    for column, terms in columns.items():
        summands = [_row_numbers(path, rows, spellings) for spellings in terms]
        values[column] = sum(summands[1:], start=summands[0])
    for knob in setting or KNOBS:
        kind = pl.String if knob == "tier" else pl.Int64
        values[knob] = pl.Series([setting.get(knob, row.get(knob)) for row in rows], dtype=kind)
    return pl.DataFrame(values).with_columns(file=pl.lit(str(path)))


def _occurs(key: str, rows: list[Record]) -> bool:
    return any(key in row for row in rows)


def _row_names(path: Path, rows: list[Record], key: str) -> pl.Series:
    """Return an id or a name of each row as text [rows], null where a row has none.

    Raises InputError if one is neither a text nor a whole number, or has lost digits.
    """
    names: list[Any] = [row.get(key) for row in rows]
    # if no row has the key, it may stand in the rows' metadata
    if not _occurs(key, rows):
        names = [m.get(key) if isinstance(m := row.get("metadata"), dict) else None for row in rows]
    # the id 7.0 is 7
    if float in map(type, names):
        with naming(path):
            floats = [x for x in names if isinstance(x, float)]
            refuse_lost_digits(pl.Series(key, floats, pl.Float64))
        exact = [isinstance(x, float) and x.is_integer() for x in names]
        names = [int(x) if whole else x for x, whole in zip(names, exact, strict=True)]
    if not {*map(type, names)} <= {int, str, type(None)}:
        raise InputError(f"{path}: {key} must be a whole number or a text in every row")
    texts = [None if value is None else str(value) for value in names]
    series = pl.Series(key, texts, dtype=pl.String)
    with naming(path):
        refuse_lost_digits(series)
    return series


def _row_numbers(path: Path, rows: list[Record], spellings: Sequence[str]) -> pl.Series:
    """Return the number of each row under the first spelling that occurs: Float64 [rows].

    It is null where a row has null. Raises InputError if no spelling occurs, or a value is no
    number.
    """
    key = next((spelling for spelling in spellings if _occurs(spelling, rows)), None)
    if key is None and rows:
        raise InputError(
            f"{path}: its rows have no {' or '.join(spellings)}; they have {', '.join(rows[0])}"
        )
    try:
        values = [row.get(key) for row in rows]  # type: ignore[arg-type]
        # true and false are scores, but no times
        if bool in map(type, values) and key not in ("accuracy", "score"):
            raise TypeError("true is no time")
        return pl.Series(values, dtype=pl.Float64)
    except (TypeError, OverflowError):
        raise InputError(f"{path}: {key} must be a number in every row") from None


def keyed(
    sides: list[pl.DataFrame], knobs: Sequence[str], dataset: str, notes: list[str]
) -> list[pl.DataFrame]:
    """Return the frames with one id, `sample_id`, which is `question_id` where every row has it.

    Several rows of a pair with latencies are repeated measurements. Raises InputError for a row
    without id, and for a pair that occurs more than once without latencies, in several files or
    with several images.
    """
    question_ids = pl.concat([side["question_id"] for side in sides])
    missing = question_ids.null_count()
    key = "sample_id" if missing else "question_id"
    if 0 < missing < len(question_ids):
        notes.append(f"{dataset}: not every row has a question_id, so sample_id is the key")
    with_ids = []
    for side in sides:
        if (without := side.filter(pl.col(key).is_null())).height:
            raise InputError(
                f"{without['file'][0]}: {without.height} rows without sample_id in the files of "
                f"{dataset}"
            )
        _refuse_repeated_pairs(side, key, knobs, dataset)
        with_ids.append(side.with_columns(sample_id=pl.col(key)).drop("question_id"))
    return with_ids


def _refuse_repeated_pairs(
    side: pl.DataFrame, key: str, knobs: Sequence[str], dataset: str
) -> None:
    """Raise InputError if a pair occurs more than once, unless it was measured repeatedly."""
    cells = side.group_by(key, *knobs).agg(
        pl.len(), pl.col("file").unique(), pl.col("image_id").n_unique()
    )
    cells = cells.filter(pl.col("len") > 1)
    if "latency_ms" in side.columns:
        cells = cells.filter((pl.col("file").list.len() > 1) | (pl.col("image_id") > 1))
    if cells.height:
        first = cells.sort("file", *knobs, key).row(0, named=True)
        where = ", ".join(sorted(first["file"]))
        raise InputError(
            f"{where}: in data set {dataset}, {cells.height} (sample, configuration) pairs occur "
            f"more than once, such as {first['len']} × {key} {first[key]}. Do ids restart in every "
            "batch or on every rank? Number all samples consecutively, or add a question_id"
        )
