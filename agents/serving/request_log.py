"""What a deployed controller did, request by request, in files that can be learned from.

A folder holds `requests-….jsonl` with a line for each request and `labels-….jsonl` with accuracies
that became known later. A line is one write to a file of this process alone, and the kernel keeps
what was written when the process is killed: kill -9 costs at most the line that was being written.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from knobwise.agents.policy.controller import Drift
from knobwise.agents.serving.exploration import Drawn
from knobwise.common.errors import InputError
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage

FORMAT = "knobwise.RequestLog/1"
REQUESTS = "requests"
LABELS = "labels"
COLUMNS = dict.fromkeys(("budget_ms", "limit_ms", "log_latency", "answer_ms", "accuracy"), "f8")
COLUMNS |= {"choice": "i8", "best": "i8", "met": "?"}
"""Fields of `Logged` that are copied from the rows as they are, and their types."""

Array = NDArray[Any]


@dataclass(slots=True)
class Result:
    """An answer under a budget."""

    answer: Answer
    configuration: dict[str, int]
    """The knobs of the answer."""
    choice: int
    """The controller's index of the configuration."""
    budget_ms: float
    limit_ms: float
    """The rest of the budget that the decision was made under."""
    drift: Drift | None
    """The drift that the decision allowed for: offsets of ln ms [C] and the factor on their spread;
    None for no drift."""
    expected: tuple[float, float]
    """The predicted mean and standard deviation of the configuration's ln ms, without drift."""
    total_ms: float
    """waited_ms + overhead_ms + answer.total_ms − prepared_ms."""
    waited_ms: float
    """Time since its arrival without its own work; 0 if the arrival is unknown."""
    overhead_ms: float
    """The time that the controller adds: features, with a first look that the answer does not
    continue from, decision, knobs set, tracking, and the calls between them."""
    decision_us: float
    """The part of the overhead that the decision took, for the whole batch."""
    request_id: str | None = None
    """The id of its row in the log; None without a log."""
    prepared_ms: float = 0.0
    """The part of the first stage that was over before the request was asked for, see
    `AdaptiveModel.prefetch`."""

    @property
    def met(self) -> bool:
        """True if the request was answered on time."""
        return self.total_ms <= self.budget_ms


class RequestLog:
    """Appends to the log in a folder.

    Several processes may share the folder. Threads that share this object need a lock of their own,
    which `AdaptiveModel` has.

    Args:
        folder: made when it is missing. Each start begins a new file.
        rows_per_file: rows after which another file is begun.

    Raises:
        InputError: nothing can be written there.
    """

    def __init__(self, folder: str | Path, rows_per_file: int = 10_000) -> None:
        self.folder = Path(folder)
        self._most = rows_per_file
        self._files: dict[str, tuple[int, str]] = {}
        self._rows: Counter[str] = Counter()
        self.lost = 0
        """Rows that could not be written, such as on a full disk. The requests were answered all
        the same."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin(REQUESTS)
        except OSError as error:
            raise InputError(f"log={folder}: cannot be written ({error.strerror})") from error

    def add(self, row: Mapping[str, Any]) -> str:
        """Write a row, see `row_of`, and return the id of its request: its own, or a new one."""
        request_id = row.get("id") or f"{self._files[REQUESTS][1]}-{self._rows[REQUESTS]}"
        self._write(REQUESTS, {"time": time.time(), **row, "id": request_id})
        return request_id

    def label(self, request_id: str, accuracy: float) -> None:
        """Write the accuracy of an answer, 0 to 1, once it is known.

        The latest label of a request counts."""
        self._write(LABELS, {"id": request_id, "accuracy": float(accuracy)})

    def close(self) -> None:
        for handle, _ in self._files.values():
            os.close(handle)
        self._files.clear()

    def _begin(self, kind: str) -> None:
        """Begin a file that no other process has."""
        if kind in self._files:
            os.close(self._files.pop(kind)[0])
        count = len(list(self.folder.glob(f"{kind}-*.jsonl")))
        while kind not in self._files:
            name = f"{count:06d}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                handle = os.open(self.folder / f"{kind}-{name}.jsonl", flags, 0o666)
                self._files[kind] = handle, name
            except FileExistsError:
                count += 1
        self._rows[kind] = 0

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        line = json.dumps({"format": FORMAT, **row}, separators=(",", ":")).encode() + b"\n"
        try:
            if kind not in self._files or self._rows[kind] >= self._most:
                self._begin(kind)
            if os.write(self._files[kind][0], line) < len(line):
                raise OSError("half a line")
            self._rows[kind] += 1
        except OSError as error:
            self.lost += 1
            self._rows[kind] = self._most  # the next row must not continue half a line
            if self.lost == 1:
                logging.getLogger(__name__).warning(
                    "log: a row is lost (%s); this and later losses are counted", error
                )


def row_of(
    controller: str, stage: FirstStage, drawn: Drawn | None, result: Result
) -> dict[str, Any]:
    """Return a row of the log in plain values.

    Args:
        controller: digest of the controller that decided.
        stage: the first stage of the request. It has no features where the guard fell back before
            there were any.
        drawn: the chances that the configuration was drawn with; None if no other was possible.
        result: the answer with its times.
    """
    drawn = drawn or Drawn(1.0, {result.choice: 1.0}, result.choice)
    if result.drift is None:
        drift = None
    else:
        drift = [_packed(result.drift[0]), float(result.drift[1])]
    return {
        "controller": controller,
        "choice": result.choice,
        "knobs": dict(result.configuration),
        "probability": drawn.probability,
        "among": list(drawn.chances),
        "chances": list(drawn.chances.values()),
        "best": drawn.best,
        "tried": drawn.tried,
        "budget_ms": float(result.budget_ms),
        "limit_ms": float(result.limit_ms),
        "features": {name: _packed(block) for name, block in stage.features.items()} or None,
        "log_latency": result.expected[0],
        "drift": drift,
        "answer_ms": result.answer.total_ms + stage.unused_ms(result.configuration),
        "total_ms": result.total_ms,
        "met": bool(result.met),
        "accuracy": None,
    }


class Logged(NamedTuple):
    """n requests of a log, with C configurations."""

    ids: Array
    features: dict[str, Array]
    """Blocks float32 [n, d]; NaN where there were none, see `seen`."""
    seen: Array
    """bool [n]: True for requests with features."""
    budget_ms: Array
    """float64 [n]: the budgets of the requests."""
    limit_ms: Array
    """float64 [n]: the rest of each budget that the decision was made under."""
    offset: Array
    """float32 [n, C]: the drift that the decision allowed for."""
    scale: Array
    """float64 [n]: the factor on the spread in this drift."""
    choice: Array
    """int64 [n]: the configuration of the answer."""
    best: Array
    """int64 [n]: the choice of the controller that served."""
    tried: Array
    """int64 [n]: the choice of a candidate on trial; −1 without a candidate."""
    propensity: Array
    """float64 [n, C]: the probability of every configuration under the policy that drew the
    choice."""
    log_latency: Array
    """float64 [n]: ln ms that was predicted of the choice, without drift."""
    answer_ms: Array
    """float64 [n]: the time of the answer."""
    met: Array
    """bool [n]: answered on time."""
    accuracy: Array
    """float64 [n], in [0, 1]; NaN where there is no label."""

    @property
    def probability(self) -> Array:
        """The probability of each choice, float64 [n], in (0, 1]."""
        return np.take_along_axis(self.propensity, self.choice[:, None], 1)[:, 0]

    def take(self, rows: Array) -> Logged:
        """Return the requests at these rows: bool [n] or int64."""
        blocks = {name: block[rows] for name, block in self.features.items()}
        return Logged(self.ids[rows], blocks, *(part[rows] for part in self[2:]))

    @classmethod
    def joined(cls, parts: Sequence[Logged]) -> Logged:
        """Join several parts of a log, in their order."""
        ids, features, *arrays = zip(*parts, strict=True)
        blocks = {}
        for name in features[0]:
            blocks[name] = np.concatenate([part[name] for part in features])
        return cls(np.concatenate(ids), blocks, *map(np.concatenate, arrays))


class ReadLog(NamedTuple):
    """The good rows of a log in the order of their files, and why the others were set aside."""

    rows: list[dict[str, Any]]
    aside: Counter[str]

    def lines(self) -> list[str]:
        """Return a line for each reason for which rows were set aside."""
        return [f"{count:,} set aside: {reason}" for reason, count in sorted(self.aside.items())]


def read_log(
    folder: str | Path,
    configurations: Sequence[Mapping[str, Any]] | None = None,
    digests: Collection[str] | None = None,
    feature_sizes: Mapping[str, int] | None = None,
) -> ReadLog:
    """Read a log and join the labels to the requests.

    Rows that cannot be used are set aside and counted by reason.

    Args:
        configurations: of the controller that is to learn from the log; None accepts all.
        digests: of this controller and of the versions before it; None accepts all.
        feature_sizes: the widths of the controller's feature blocks; None accepts all.

    Raises:
        InputError: there is no log in the folder.
    """
    folder = Path(folder)
    aside = Counter[str]()
    if not any(folder.glob(f"{REQUESTS}-*.jsonl")):
        raise InputError(
            f"log={folder}: no {REQUESTS}-….jsonl in it; give the folder of AdaptiveModel(log=…)"
        )
    rows: dict[str, dict[str, Any]] = {}
    for row in _lines(folder, REQUESTS, aside):
        if reason := _fault(row, configurations, digests, feature_sizes):
            aside[reason] += 1
        elif row["id"] in rows:
            aside["a second row of the same request"] += 1
        else:
            rows[row["id"]] = row
    for label in _lines(folder, LABELS, aside):
        request_id = label.get("id")
        accuracy = label.get("accuracy")
        if not _is_number(accuracy) or not 0 <= accuracy <= 1:
            aside["a label outside [0, 1]"] += 1
        elif not isinstance(request_id, str) or request_id not in rows:
            aside["a label of an unknown request"] += 1
        else:
            rows[request_id]["accuracy"] = accuracy
    return ReadLog(list(rows.values()), aside)


def logged_of(
    rows: Sequence[Mapping[str, Any]],
    count: int,
    feature_sizes: Mapping[str, int],
    digest: str | None = None,
) -> Logged:
    """Return good rows as arrays.

    Args:
        rows: n rows of a log.
        count: C, the number of configurations.
        feature_sizes: the widths of the feature blocks.
        digest: of the controller that serves. Trials beside other controllers do not count.
    """
    n = len(rows)
    features = {
        name: np.full((n, size), np.nan, np.float32) for name, size in feature_sizes.items()
    }
    offset = np.zeros((n, count), np.float32)
    scale = np.ones(n)
    propensity = np.zeros((n, count))
    tried = np.full(n, -1)
    for i, row in enumerate(rows):
        for name, block in (row["features"] or {}).items():
            features[name][i] = _unpacked(block)
        if row["drift"] is not None:
            offset[i] = _unpacked(row["drift"][0])
            scale[i] = row["drift"][1]
        propensity[i, row["among"]] = row["chances"]
        if row["tried"] is not None and row["controller"] == digest:
            tried[i] = row["tried"]
    columns = {}
    for name, kind in COLUMNS.items():
        columns[name] = np.array([row[name] for row in rows], kind)
    return Logged(
        ids=np.array([row["id"] for row in rows]),
        features=features,
        seen=np.array([row["features"] is not None or not feature_sizes for row in rows], bool),
        offset=offset,
        scale=scale,
        tried=tried,
        propensity=propensity,
        **columns,
    )


def _lines(folder: Path, kind: str, aside: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all files of a kind, and count in `aside` what is none."""
    for path in sorted(folder.glob(f"{kind}-*.jsonl")):
        content = path.read_bytes()
        *whole, last = content.split(b"\n")
        if last:
            aside["the torn last line of a file"] += 1
        for line in whole:
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or row.get("format") != FORMAT:
                    raise ValueError(line)
            except (ValueError, RecursionError):
                aside["no row of a log"] += 1
                continue
            yield row


def _fault(
    row: dict[str, Any],
    configurations: Sequence[Mapping[str, Any]] | None,
    digests: Collection[str] | None,
    feature_sizes: Mapping[str, int] | None,
) -> str:
    """Return why nothing can be learned from a row; "" if something can.

    Sets `tried` and `accuracy` to None where they are missing.
    """
    count = math.inf if configurations is None else len(configurations)
    return (
        _fault_of_choice(row, configurations, count, digests)
        or _fault_of_outcome(row, count)
        or _fault_of_arrays(row, count, feature_sizes)
    )


def _fault_of_choice(
    row: dict[str, Any],
    configurations: Sequence[Mapping[str, Any]] | None,
    count: float,
    digests: Collection[str] | None,
) -> str:
    """Return what is wrong with the controller, the choice or its chances."""
    probability = row.get("probability")
    choice = row.get("choice")
    if digests is not None and row.get("controller") not in digests:
        return "of another controller"
    if probability is None:
        return "without a probability"
    if not _is_number(probability) or not 0 < probability <= 1:
        return "a probability outside (0, 1]"
    if row.get("price") is not None:  # as earlier versions could, without the guard
        return "decided at a price"
    if not _is_index(choice, count):
        return "an unknown configuration"
    if configurations is not None and row.get("knobs") != configurations[choice]:
        return "an unknown configuration"
    if not _are_chances(row.get("among"), row.get("chances"), count, choice, probability):
        return "a probability that the chances of the draw contradict"
    return ""


def _fault_of_outcome(row: dict[str, Any], count: float) -> str:
    """Return what is wrong with the times, the label or the plain fields."""
    whole = (
        isinstance(row.get("id"), str)
        and isinstance(row.get("met"), bool)
        and isinstance(row.get("knobs"), dict)
    )
    tried = row.setdefault("tried", None)
    known = _is_index(row.get("best"), count) and (tried is None or _is_index(tried, count))
    if not (whole and known):
        return "a damaged row"
    times = [row.get(name) for name in ("budget_ms", "limit_ms", "answer_ms")]
    positive = all(_is_number(ms) and ms > 0 for ms in times)
    if not (positive and _is_number(row.get("log_latency"))):
        return "times that are not positive and finite"
    accuracy = row.setdefault("accuracy", None)
    if accuracy is not None and not (_is_number(accuracy) and 0 <= accuracy <= 1):
        return "an accuracy outside [0, 1]"
    return ""


def _fault_of_arrays(
    row: dict[str, Any], count: float, feature_sizes: Mapping[str, int] | None
) -> str:
    """Return what is wrong with the features or the drift."""
    try:
        sizes = {name: len(_unpacked(block)) for name, block in (row["features"] or {}).items()}
        if row["drift"] is None:
            packed, scale = ("", 1.0)
        else:
            packed, scale = row["drift"]
        offsets = _unpacked(packed)
    except (KeyError, TypeError, ValueError, AttributeError):
        return "a damaged row"
    shaped = row["drift"] is None or count in (math.inf, len(offsets))
    if not (shaped and np.isfinite(offsets).all() and _is_number(scale) and scale > 0):
        return "a drift of another shape"
    if sizes and feature_sizes is not None and sizes != dict(feature_sizes):
        return "features of other shapes"
    return ""


def _are_chances(among: Any, chances: Any, count: float, choice: int, probability: float) -> bool:
    """Return True if these are probabilities of distinct configurations, with this one of the
    choice."""
    if not (isinstance(among, list) and isinstance(chances, list) and len(among) == len(chances)):
        return False
    if len({*map(str, among)}) < len(among) or not all(_is_index(i, count) for i in among):
        return False
    if not all(map(_is_number, chances)):
        return False
    if min(chances, default=0) <= 0 or abs(sum(chances) - 1) > 1e-6:
        return False
    return choice in among and abs(chances[among.index(choice)] - probability) < 1e-9


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)  # a bool is no number here


def _is_index(value: Any, count: float) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < count


def _packed(values: Array) -> str:
    """Return values as float32 in base64."""
    return base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()


def _unpacked(text: Any) -> Array:
    """Return what `_packed` wrote. Raises TypeError or ValueError for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.float32)
