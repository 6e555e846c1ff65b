"""Read the log of a deployed controller as arrays that can be learned from.

`knobwise.agents.learning.request_log` writes the log. Rows that cannot be used are skipped and
counted by reason.
"""

from __future__ import annotations

import heapq
import math
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorClass, TensorDict
from torch import Tensor

from knobwise.agents.deployed.arrays import MIN_MS
from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.learning.log_files import count_lines, files_of, rows_in
from knobwise.agents.learning.request_log import LABELS, REQUESTS, unpack_floats
from knobwise.common.errors import InputError
from knobwise.common.words import setting

LARGEST = sys.float_info.max
ROUNDED = 0.005
"""The relative difference that rounding may make between a time and a sum of others."""
AT_LIMIT = 1e-4
"""The relative difference between time and budget within which rounding may decide what is late."""
LEAVES = 0.9
"""Whoever leaves after this share of its budget waited until its deadline, by a clock that began
before the request arrived."""
MAX_ROWS = 1 << 18
"""Of a longer log about so many requests are read, with their labels."""
MAX_CELLS = 1 << 25
"""And at most so many requests × configurations."""
OF_ANOTHER = "of another controller"
COLUMNS = {
    "choice": "i8",
    "limit_ms": "f8",
    "answer_ms": "f8",
    "met": "?",
    "accuracy": "f8",
}
"""Fields of `Logged` that are copied from the rows unchanged, and their types."""


class Logged(TensorClass):
    """Holds n requests of a log, with C configurations; indexed and joined like a tensor."""

    features: TensorDict
    """Blocks float32 [n, d]; NaN where there were none, see `seen`."""
    seen: Tensor
    """bool [n]: True for requests with features."""
    offset: Tensor
    """float32 [n, C]: the drift that the decision allowed for."""
    scale: Tensor
    """float64 [n]: the factor on the spread in this drift."""
    propensity: Tensor
    """float64 [n, C]: the probability of every configuration under the policy that drew the
    choice."""
    choice: Tensor
    """int64 [n]: the configuration of the answer."""
    guard_ms: Tensor
    """float64 [n]: what was left of each budget when the guard was asked."""
    limit_ms: Tensor
    """float64 [n]: what was left of each budget for the answer."""
    answer_ms: Tensor
    """float64 [n]: the time of the answer; the least that it can be where it was `abandoned`."""
    met: Tensor
    """bool [n]: answered on time, and at no further cost above its limit, as far as it is known."""
    abandoned: Tensor
    """bool [n]: nobody waited for the answer, though it was still to come at the deadline."""
    accuracy: Tensor
    """float64 [n], in [0, 1]; NaN where there is no label."""

    @property
    def probability(self) -> Tensor:
        """The probability of each choice, float64 [n], in (0, 1]."""
        return of_choices(self.propensity, self.choice)

    @property
    def labelled(self) -> Tensor:
        """True where the accuracy is known, bool [n]."""
        return ~self.accuracy.isnan()


def of_choices(values: Tensor, choices: Tensor) -> Tensor:
    """Return the values of choices int64 [n], [n, C] → [n]."""
    return values.gather(1, choices.unsqueeze(1)).squeeze(1)


class ReadLog(NamedTuple):
    """The valid rows of a log in time order, and counts of skipped rows by reason."""

    rows: list[dict[str, Any]]
    aside: Counter[str]
    attempts: dict[str, Counter[bool]]
    """For each setting, its requests by whether it gave no answer, also those in skipped rows."""

    def lines(self) -> list[str]:
        """Return a line for each reason for which rows were skipped."""
        return [f"{count:,} skipped: {reason}" for reason, count in sorted(self.aside.items())]


def read_log(
    folder: str | Path,
    controller: NumpyController | None = None,
    versions: Collection[str] = (),
) -> ReadLog:
    """Read a log and join the labels to the requests. If a label is above 1, none counts.

    A row may hold its `accuracy` itself, where it was known at once; later labels replace it. Of a
    log of more than `MAX_ROWS` one request in so many is read, chosen by its id, so that its labels
    are read with it; the others are counted.

    Files that were compressed since, as by logrotate, are unpacked while they are read; others of
    such names are counted by name.

    Args:
        folder: of the log.
        controller: the one that is to learn from the log; None accepts rows of any controller.
        versions: digests of earlier versions of this controller, whose rows count too.

    Raises:
        InputError: there is no such folder, or no log in it.
    """
    folder = Path(folder)
    files = {kind: files_of(folder, kind) for kind in (REQUESTS, LABELS)}
    if not files[REQUESTS][0]:
        problem = f"no {REQUESTS}-….jsonl in it" if folder.is_dir() else "no such folder"
        if unreadable := files[REQUESTS][1]:
            problem += f" ({unreadable[0].name} is neither that nor .jsonl.gz)"
        raise InputError(
            f"log={folder}: {problem}; give the folder that you passed as log=… to wrap or "
            "AdaptiveModel"
        )
    most = MAX_ROWS
    if controller is not None:
        most = min(most, max(MAX_CELLS // len(controller.configurations), 1))
    every = math.ceil(count_lines(folder) / most)
    aside = Counter[str]()
    for path in (*files[REQUESTS][1], *files[LABELS][1]):
        aside[f"the file {path.name}, which is neither .jsonl nor .jsonl.gz"] += 1
    attempts: dict[str, Counter[bool]] = {}
    rows, labels, unused = _requests(folder, controller, versions, every, aside, attempts)
    # a label comes after its request; of several the one sent last counts
    of_read = (line for line in rows_in(folder, LABELS, aside) if _is_read(line[1], every))
    labels += _as_sent(of_read)
    # of labels from 0 to 100, only those of wrong answers would count
    if any(_is_number(label.get("accuracy")) and label["accuracy"] > 1 for label in labels):
        aside["a label of a log that has labels above 1, such as in per cent"] = len(labels)
        labels = []
    _join(labels, rows, unused, aside)
    # several processes may have written at once
    return ReadLog(sorted(rows.values(), key=_moment), aside, attempts)


def _requests(
    folder: Path,
    controller: NumpyController | None,
    versions: Collection[str],
    every: int,
    aside: Counter[str],
    attempts: dict[str, Counter[bool]],
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], set[str]]:
    """Read the requests of a log, and count in `aside` those that are not used, and what settings
    gave no answer in `attempts`; arguments as in `read_log`, and one request in `every` is read.

    Returns:
        The good rows by id, still without accuracy; those that hold one, as labels; and the ids of
        bad rows.
    """
    rows: dict[str, dict[str, Any]] = {}
    labels = []
    unused: set[str] = set()
    for _, row in rows_in(folder, REQUESTS, aside):
        if not _is_read(row, every):
            aside[f"the log is large: one request in {every} is read, chosen by its id"] += 1
            continue
        try:
            reason = next(_faults(row, controller, versions), "")
            if reason != OF_ANOTHER:
                _count_attempts(row, attempts)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            reason = "a damaged row"
        if not reason and row["id"] in rows:
            reason = "a second row of the same request"
        if reason:
            aside[reason] += 1
            unused.add(str(row.get("id")))
        else:
            # an answer above a limit counts as late; older logs do not say it
            met = row["met"] and not row.get("over_limit", False)
            rows[row["id"]] = row | {"accuracy": None, "met": met}
            if row.get("accuracy") is not None:
                labels.append(row)
    return rows, labels, unused


def _count_attempts(row: Mapping[str, Any], attempts: dict[str, Counter[bool]]) -> None:
    """Count the setting of a row, and those that were tried before it and gave no answer."""
    tried = [(knobs, True) for knobs in row.get("tried", [])]
    for knobs, is_fault in [*tried, (row["knobs"], bool(row.get("fault")))]:
        attempts.setdefault(setting(knobs), Counter())[is_fault] += 1


def _join(
    labels: Iterable[Mapping[str, Any]],
    rows: Mapping[str, dict[str, Any]],
    unused: Collection[str],
    aside: Counter[str],
) -> None:
    """Give rows, by id, the accuracies of labels. Count in `aside` the labels that are not used;
    `unused` are ids of requests that were skipped."""
    for label in labels:
        # a program that writes labels itself may write an id as a number
        name = str(label.get("id"))
        request = rows.get(name)
        if not _is_number(label.get("accuracy"), 0):
            aside["a label outside [0, 1]"] += 1
        elif request is None:
            what = "a skipped request" if name in unused else "an unknown request"
            aside[f"a label of {what}"] += 1
        elif request.get("abandoned"):
            aside["a label of an answer that nobody waited for"] += 1
        else:
            request["accuracy"] = label["accuracy"]


def logged_of(rows: Sequence[Mapping[str, Any]], controller: NumpyController) -> Logged:
    """Return n good rows of a log as tensors, for the controller that is to learn from them."""
    n = len(rows)
    count = len(controller.configurations)
    features = {}
    for name, size in controller.feature_sizes.items():
        features[name] = np.full((n, size), np.nan, np.float32)
    offset = np.zeros((n, count), np.float32)
    scale = np.ones(n)
    propensity = np.zeros((n, count))
    for i, row in enumerate(rows):
        for name, block in (row["features"] or {}).items():
            features[name][i] = unpack_floats(block)
        if row["drift"] is not None:
            offset[i] = unpack_floats(row["drift"][0])
            scale[i] = row["drift"][1]
        propensity[i, row["among"]] = row["chances"]
    columns = {"offset": offset, "scale": scale, "propensity": propensity}
    for name, kind in COLUMNS.items():
        columns[name] = np.array([row[name] for row in rows], kind)
    # older logs have neither
    columns["guard_ms"] = np.array([row.get("guard_ms", row["budget_ms"]) for row in rows], "f8")
    columns["abandoned"] = np.array([bool(row.get("abandoned")) for row in rows], bool)
    # if the controller has no feature blocks, no request lacks any
    columns["seen"] = np.array([row["features"] is not None or not features for row in rows], bool)
    return Logged(TensorDict(features, [n]), **columns, batch_size=[n])


def _is_read(row: Mapping[str, Any], every: int) -> bool:
    """Return whether a row, a request or a label, is of one of the requests that are read: one in
    so many, whatever order they are in."""
    if every <= 1:
        return True
    name = str(row.get("id")).encode(errors="replace")
    return zlib.crc32(name) % every == 0


def _as_sent(lines: Iterable[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return labels, each with the name of its file, in the order in which they were sent.

    Those that one machine wrote between two starts are in the order of its time since the start;
    those of one file that do not say it, such as by another program, in the order of the lines.
    Only between such sequences does the time of day decide, which may be set back.
    """
    sequences: dict[tuple[bool, str], list[tuple[float, dict[str, Any]]]] = {}
    for name, row in lines:
        boot: Any = row.get("boot")
        since: Any = row.get("since_boot_s")
        if isinstance(boot, str) and boot and _is_number(since):
            sequences.setdefault((True, boot), []).append((since, row))
        else:
            sequences.setdefault((False, name), []).append((0.0, row))
    timed = []
    for sequence in sequences.values():
        sequence.sort(key=itemgetter(0))
        rows = [row for _, row in sequence]
        # the time of day may not go back within a sequence
        timed.append([*zip(accumulate(map(_moment, rows), max), rows, strict=True)])
    return [row for _, row in heapq.merge(*timed, key=itemgetter(0))]


def _faults(
    row: dict[str, Any], controller: NumpyController | None, versions: Collection[str]
) -> Iterator[str]:
    """Yield why nothing can be learned from a row.

    The caller takes the first reason alone, so each check may rely on those before it. The
    arguments are as in `read_log`.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: the row is damaged.
    """
    # the decision: whose it is, and its chances
    if controller and row["controller"] not in (controller.digest, *versions):
        yield OF_ANOTHER
    if row.get("fault"):
        yield "without an answer"
    # by static, where another policy would have read features; or cut short, by another attempt, or
    # timed otherwise
    if row.get("failed"):
        yield "decided without features, or answered otherwise than decided"
    count = len(controller.configurations) if controller else math.inf
    choice = row["choice"]
    known = all(type(c) is int and 0 <= c < count for c in (choice, row["best"], *row["among"]))
    if not known or (controller and row["knobs"] != controller.configuration(choice)):
        yield "an unknown configuration"
    chances = dict(zip(row["among"], row["chances"], strict=True))
    possible = all(map(_is_positive, chances.values())) and abs(sum(chances.values()) - 1) < 1e-6
    if not (possible and abs(chances.get(choice, 0) - row["probability"]) < 1e-9):
        yield "exploration probabilities (`chances`, `probability`) are inconsistent"

    # the outcome of the decision
    kinds = {"id": str, "met": bool, "knobs": dict}
    typed = all(isinstance(row[name], kind) for name, kind in kinds.items())
    if not (typed and isinstance(row.get("over_limit", False), bool)):
        yield "a damaged row"
    limits = row["budget_ms"], row.get("guard_ms", row["budget_ms"]), row["limit_ms"]
    timed = all(map(_is_positive, (*limits, row["answer_ms"])))
    if not (timed and _is_number(row["log_latency"]) and _is_number(row["total_ms"], 0)):
        yield "times that are not positive and finite"
    if not _times_agree(row):
        yield "times that contradict each other"
    if row.get("abandoned") and row["total_ms"] < LEAVES * row["budget_ms"]:
        yield "left before the deadline"
    on_time = row["total_ms"] <= row["budget_ms"] and not row.get("abandoned")
    if row["met"] != on_time and not _alike(row["total_ms"], row["budget_ms"], AT_LIMIT):
        yield "`met` disagrees with total_ms and budget_ms"

    # the arrays that the decision was made from
    sizes = {name: len(unpack_floats(block)) for name, block in (row["features"] or {}).items()}
    if sizes and controller and sizes != controller.feature_sizes:
        yield "features of other shapes"
    if row["drift"] is not None:
        text, scale = row["drift"]
        offset = unpack_floats(text)
        shaped = count in (math.inf, len(offset)) and np.isfinite(offset).all()
        if not (shaped and _is_positive(scale)):
            yield "a drift of another shape"


def _times_agree(row: Mapping[str, Any]) -> bool:
    """Return whether the times of a row, in ms and all finite, can belong to one request."""
    budget, limit, answer, total = (
        float(row[name]) for name in ("budget_ms", "limit_ms", "answer_ms", "total_ms")
    )
    # what is left of a budget is no more than the budget
    if limit > MIN_MS and limit > budget and not _alike(limit, budget):
        return False
    return _is_number(row["beside_ms"]) and _alike(answer, total - row["beside_ms"])


def _alike(first: float, second: float, within: float = ROUNDED) -> bool:
    """Return True for times that are the same, apart from rounding."""
    return math.isclose(first, second, rel_tol=within)


def _moment(row: Mapping[str, Any]) -> float:
    """Return when a row was written, in s; 0 if it does not say."""
    moment: Any = row.get("time")
    return float(moment) if _is_number(moment) else 0.0


def _is_number(value: Any, least: float = -math.inf) -> bool:
    """Return True for a finite number of at least `least`. A bool does not count as one."""
    # an int may be too large for a float
    return type(value) in (int, float) and max(least, -LARGEST) <= value <= LARGEST


def _is_positive(value: Any) -> bool:
    """Return True for a finite number above 0."""
    return _is_number(value, 0) and value != 0
