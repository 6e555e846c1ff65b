"""What the values of columns say of who chose them: knobs are set by whoever measures; an outcome,
the time and the number of a row by nobody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from knobwise.envs.readers.column_names import INDEX, named_like
from knobwise.envs.readers.column_values import glimpse, holds_no_text
from knobwise.envs.tables.splits import first_rows, joint_codes

SECONDS = np.array([1.42e9, 2.2e9])
"""The years 2015 to 2039, in seconds since 1970."""
FEWEST_ROWS = 10
"""In fewer rows numbers may be in order, or all different, by chance."""
RANDOM_LETTERS = 6
"""So many letters have times, dates, paths and names of runs that differ in every row."""
MAX_ROWS = 100_000
"""Of a longer table, as many samples are looked at as have about so many rows."""
AT_ONCE = 1 << 20
"""Rows that are looked at together."""
NOWHERE = (1 << 32) - 1
"""Stands for no row, of which there are fewer."""
MOST_PLACES = 4
"""Numbers are counted in a list of places that has at most so many for each row."""
LOOKED_AT_FIRST = 100_000
"""Rows in which a column mostly shows that it varies inside samples, if it does."""
FEWEST_MEETINGS = 12
"""If fewer are expected, that there are none may be chance."""
FEWEST_IN_GRID = 8
"""The same where all samples have equal settings, which is rarer still."""
MAX_REPEATED = 0.25
"""Where requests were sent again, so many of the expected values of an outcome may meet."""
COMPLETE = 0.9
"""A column that has more of its values in each sample was set, whatever its name says."""
FEWEST_VALUES = 30
"""So many values, of which no two samples have one in common, are none that somebody set."""


def varying_among(
    frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str], empty: bool = True
) -> list[str]:
    """Return those of these columns that have several values in a sample; empty may be one."""
    fixed = list(names)
    # most columns that vary do so at once
    for rows in (LOOKED_AT_FIRST, len(frame)):
        head = frame.select(fixed).head(rows)
        first = first_of_sample(keys.head(rows)) if fixed else None
        fixed = [name for name in fixed if not _varies(head[name], keys, first, empty)]
        if rows >= len(frame):
            break
    return [name for name in names if name not in fixed]


def _varies(values: pl.Series, keys: pl.DataFrame, first: Any, empty: bool) -> bool:
    """Return whether a sample has several values; `first` is the first row of each row's sample."""
    if not empty and values.null_count():
        known = values.is_not_null()
        keys = keys.head(len(values)).filter(known)
        values = values.filter(known)
        first = first_of_sample(keys)
    # a part at a time, of which no long copy is made
    for start in range(0, len(values), AT_ONCE):
        expected = values.gather(first.slice(start, AT_ONCE))
        if values.slice(start, AT_ONCE).ne_missing(expected).any():
            return True
    return False


def first_of_sample(keys: pl.DataFrame) -> pl.Series:
    """Return for each row the number of the first row that has the same ids."""
    keys = _numbered(keys)
    if (coded := _small_codes(keys)) is not None:
        return pl.Series("row", _first_of_codes(*coded)).gather(coded[0])
    first = pl.col("row").first().over(keys.columns)
    return keys.with_row_index("row").select(first).to_series()


def rows_of_samples(keys: pl.DataFrame) -> pl.Series:
    """Return the number of the first row of each sample, in their order."""
    numbered = _numbered(keys)
    if (coded := _small_codes(numbered)) is not None:
        first = _first_of_codes(*coded)
        return pl.Series("row", np.sort(first[first != NOWHERE]))
    if keys.width == 1:
        return keys.to_series().arg_unique()
    return keys.with_row_index("row").unique(keys.columns, keep="first", maintain_order=True)["row"]


def _first_of_codes(codes: pl.Series, count: int) -> np.ndarray:
    """Return the first row that has each of the numbers from 0 to `count`, uint32 [count], or
    `NOWHERE`."""
    first = np.full(count, NOWHERE, np.uint32)
    # of rows with one code the last that is written stays
    for start in reversed(range(0, len(codes), AT_ONCE)):
        part = codes.slice(start, AT_ONCE).to_numpy()
        rows = np.arange(start, start + len(part), dtype=np.uint32)
        first[part[::-1]] = rows[::-1]
    return first


def samples_varying(frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str]) -> int:
    """Return how many samples have several values in one of these columns."""
    first = first_of_sample(keys)
    varying = []
    for start in range(0, len(frame), AT_ONCE):
        of_part = first.slice(start, AT_ONCE)
        differs = pl.repeat(False, len(of_part), dtype=pl.Boolean, eager=True)
        for name in names:
            differs |= frame[name].slice(start, AT_ONCE).ne_missing(frame[name].gather(of_part))
        varying.append(of_part.filter(differs).unique())
    return pl.concat(varying).n_unique() if varying else 0


def count_distinct(frame: pl.DataFrame) -> int:
    """Return how many different rows there are."""
    frame = _numbered(frame)
    if (coded := _small_codes(frame)) is not None:
        codes, count = coded
        seen = np.zeros(count, bool)
        for start in range(0, len(codes), AT_ONCE):
            seen[codes.slice(start, AT_ONCE).to_numpy()] = True
        return int(seen.sum())
    return frame.to_series().n_unique() if frame.width == 1 else frame.n_unique()


def _small_codes(frame: pl.DataFrame) -> tuple[pl.Series, int] | None:
    """Return the only column as numbers from 0 on, and how many these may be, if they are whole
    numbers of which a list has hardly more places than there are rows."""
    if frame.width != 1 or frame.is_empty() or len(frame) >= NOWHERE:
        return None
    values = frame.to_series()
    values = values.to_physical() if values.dtype == pl.Enum else values
    whole = values.dtype.is_integer() and values.dtype not in (pl.Int128, pl.UInt64)
    if not whole or values.null_count():
        return None
    low: Any = values.min()
    high: Any = values.max()
    count = high - low + 1
    if count > MOST_PLACES * len(values):
        return None
    return (values if low == 0 else values.cast(pl.Int64) - low), count


def _numbered(frame: pl.DataFrame) -> pl.DataFrame:
    """Return one column of numbers, equal where rows are, if all columns are few whole numbers or
    names: it is searched in a tenth of the time. Else return the frame."""
    columns = []
    most = 1
    for column in frame:
        values = column.to_physical() if column.dtype == pl.Enum else column
        whole = values.dtype.is_integer() and values.dtype not in (pl.Int128, pl.UInt64)
        if not whole or values.null_count() or values.is_empty():
            return frame
        low: Any = values.min()
        high: Any = values.max()
        columns.append((values, low, high - low + 1))
        most *= high - low + 1
    if frame.width < 2 or most >= 1 << 62:
        return frame
    code: Any = np.zeros(len(frame), np.uint32 if most < 1 << 32 else np.int64)
    for start in range(0, len(frame), AT_ONCE):
        part = code[start : start + AT_ONCE]
        for values, low, size in columns:
            part *= size
            part += (values.slice(start, AT_ONCE).to_numpy().astype(np.int64) - low).astype(
                code.dtype
            )
    return pl.Series("code", code).to_frame()


def differs_in_every_row(series: pl.Series) -> bool:
    """Return whether a column holds long values that are all different, as times, dates, paths and
    names of runs are. Nobody could measure such a setting twice."""
    if holds_no_text(series.dtype) or len(series) < FEWEST_ROWS or series.n_unique() < len(series):
        return False
    letters: Any = series.cast(pl.String).str.len_chars().median()
    return letters is not None and letters >= RANDOM_LETTERS


def is_clock(series: pl.Series) -> bool:
    """Return whether all values are times since 1970 of these years, as `created` of an answer is,
    in seconds or a smaller unit. Nobody sets the time."""
    if holds_no_text(series.dtype) or series.dtype == pl.Boolean:
        return False
    for values in (glimpse(series), series.drop_nulls()):
        numbers = values.cast(pl.String).cast(pl.Float64, strict=False)
        inside = [numbers.is_between(*(SECONDS * unit)).all() for unit in (1, 1e3, 1e6, 1e9)]
        if numbers.is_empty() or numbers.null_count() or not any(inside):
            return False
    return True


def numbers_of_rows(frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """Return those of these columns that number rows: the index of pandas, and whole numbers
    almost without gaps that occur once each.

    Args:
        frame, keys: rows, and their ids; numbers may start anew in every `dataset`.
    """
    numbered = named_like(names, INDEX)
    part = keys["dataset"] if "dataset" in keys.columns else pl.repeat(0, len(keys), eager=True)
    parts = part.n_unique()
    for name in names:
        # numbers of rows are all different, so that most columns need no closer look
        if name in numbered or frame[name].n_unique() * parts < len(frame):
            continue
        rows = pl.DataFrame({"part": part, "number": as_whole_numbers(frame[name])})
        sizes = rows.group_by("part").agg(
            count=pl.len(),
            distinct=pl.col("number").drop_nulls().n_unique(),
            width=pl.col("number").max() - pl.col("number").min() + 1,
        )
        # a few rows may have been removed since
        once = (sizes["distinct"] == sizes["count"]) & (sizes["width"] <= 1.25 * sizes["count"])
        if once.all() and len(frame) >= FEWEST_ROWS * parts:
            numbered.append(name)
    return numbered


def as_whole_numbers(series: pl.Series) -> pl.Series:
    """Return the whole numbers of a column, Int64, null for anything else."""
    if holds_no_text(series.dtype):
        return pl.repeat(None, len(series), dtype=pl.Int64, eager=True)
    text = series.cast(pl.String).str.strip_chars().str.replace(r"\.0+$", "")
    return text.cast(pl.Int64, strict=False)


class Design:
    """The experimental design: which column values co-occur in a sample. Knob values do, outcome
    values never do.

    Whoever measures chooses the knobs. Each sample gets all settings, the same ones as others, or
    some at random; so two settings that differ in one knob alone *meet* in a sample as often as by
    chance. An outcome varies from sample to sample, but has one value for each sample and setting:
    two of its values never meet there, although they do across samples.
    """

    def __init__(
        self,
        frame: pl.DataFrame,
        keys: pl.DataFrame,
        columns: Sequence[str],
        repeats: Sequence[str],
    ) -> None:
        """Look at these columns.

        Args:
            frame, keys: the rows of a table, and their ids.
            columns: what may be knobs; no lists.
            repeats: columns that may number measurements of the same setting.
        """
        # whole samples, the same ones whatever the order of the rows
        step = math.ceil(len(frame) / MAX_ROWS)
        if step > 1:
            names = keys.unique().sort(keys.columns).gather_every(step)
            chosen = keys.with_row_index("row").join(names, on=keys.columns, how="semi")["row"]
            frame = frame[chosen]
            keys = keys[chosen]
        self._sample = _codes(keys)
        datasets = keys.select(c for c in keys.columns if c == "dataset")
        self._dataset = _codes(datasets) if datasets.width else np.zeros(len(frame), np.int64)
        self._values = {name: _codes(frame.select(name)) for name in columns}
        complete = [
            self._values[name]
            for name in columns
            if name not in repeats and self.size(name) > 1 and self.regularity(name) == 1
        ]
        sample = self._sample
        for name in repeats:
            number = _codes(frame.select(name))
            # a run of one setting, such as one model, is a repeat of nothing: only its rank among
            # the runs of that setting tells measurements apart
            fixed = [values for values in complete if _is_function(number, values, sample)]
            if fixed:
                number = _rank_within(joint_codes(self._sample, *fixed), number)
            numbered = joint_codes(sample, number)
            # a number for each row says nothing
            if 2 * (1 + numbered.max()) <= len(frame):
                sample = numbered
        self._sample = joint_codes(sample)

    def size(self, column: str) -> int:
        """Return how many values a column has."""
        return int(self._values[column].max()) + 1

    def regularity(self, column: str) -> float:
        """Return in which share of the samples the column has the values, and each as often, that
        it has in most samples."""
        weights = np.random.default_rng(0).integers(1, 1 << 62, self.size(column), np.uint64)
        sums = np.zeros(self._sample.max() + 1, np.uint64)
        np.add.at(sums, self._sample, weights[self._values[column]])
        return float(np.unique(sums, return_counts=True)[1].max() / len(sums))

    def cooccurrences(self, columns: Sequence[str], knobs: Sequence[str]) -> tuple[int, float]:
        """Count pairs of distinct column values within a sample at equal knobs.

        Returns:
            How many there are, and how many there would be if each sample had got its settings at
            random. Both agree where all samples have the same settings.
        """
        setting = joint_codes(self._dataset, *(self._values[knob] for knob in knobs))
        both = joint_codes(setting, *(self._values[column] for column in columns))
        # a setting that was measured again counts once
        rows = first_rows(joint_codes(self._sample, both))
        sample = self._sample[rows]
        setting = setting[rows]
        both = both[rows]
        dataset = self._dataset[rows]

        def pairs(*codes: np.ndarray) -> np.ndarray:
            """Return how many pairs of rows of each data set are equal in these."""
            joined = joint_codes(*codes)
            count = np.bincount(joined)
            of_pairs = dataset[first_rows(joined)]
            return np.bincount(of_pairs, count * (count - 1) / 2, self._dataset.max() + 1)

        met = pairs(sample, setting)
        in_sample = pairs(sample)
        same = pairs(both)
        # the same of rows of different samples
        across = pairs(dataset) - in_sample
        differ = pairs(setting) - same - met
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = np.nan_to_num(in_sample * differ / (across - same))
        return int(met.sum()), float(expected.sum())

    def are_outcomes(
        self, columns: Sequence[str], knobs: Sequence[str], fewest: int = FEWEST_MEETINGS
    ) -> bool:
        """Return whether values of columns meet far less often than chosen ones would, where these
        knobs are equal. If fewer than `fewest` are expected, that none meet may be chance."""
        met, expected = self.cooccurrences(columns, knobs)
        surely = expected - met >= math.sqrt(fewest * expected) > 0
        return surely and met <= MAX_REPEATED * expected

    def suspicious(self, knobs: Sequence[str]) -> list[str]:
        """Return the supposed knobs that look like outcomes: within a sample, and with the other
        knobs fixed, they almost never take two values. With few rows that may be chance."""
        regular = [c for c in knobs if self.regularity(c) == 1]
        suspicious: list[str] = []
        for column in knobs:
            for others in ([c for c in knobs if c != column], regular):
                met, expected = self.cooccurrences([column], others)
                if column not in (*regular, *suspicious) and met <= MAX_REPEATED * expected > 0:
                    suspicious.append(column)
        return suspicious

    def _is_shared(self, column: str) -> bool:
        """Return whether a value of a column occurs in two samples."""
        values = self._values[column]
        return int(joint_codes(self._sample, values).max()) > values.max()

    def is_complete(self, column: str, knobs: Sequence[str]) -> bool:
        """Return whether samples have several values of a column where these knobs are equal, and
        nearly all that there are."""
        setting = joint_codes(self._dataset, *(self._values[knob] for knob in knobs))
        both = joint_codes(setting, self._values[column])
        values = np.bincount(setting[first_rows(both)])
        cells = first_rows(joint_codes(self._sample, setting))
        measured = int(joint_codes(self._sample, both).max()) + 1
        return measured > max(len(cells), COMPLETE * values[setting[cells]].sum())

    def knobs_among(self, columns: Sequence[str]) -> list[str]:
        """Return those of these columns that are no outcomes, in their order."""
        regular = [c for c in columns if self.regularity(c) == 1]
        others = [c for c in columns if c not in regular]
        if self.are_outcomes(others, regular, FEWEST_IN_GRID):
            # they suffice; what follows from them may be another name of a setting
            return [c for c in columns if c in regular or not self.cooccurrences([c], regular)[1]]
        order = sorted(others, key=lambda c: (-self.regularity(c), self.size(c)))
        # what differs in all samples was not set; what few samples have may be an outcome
        order = [c for c in order if self.size(c) < FEWEST_VALUES or self._is_shared(c)]
        knobs = list(regular)
        # an outcome that came first may have hidden a knob, so look twice
        for _ in range(2):
            for column in order:
                if column not in knobs and not self.are_outcomes([column], knobs):
                    knobs.append(column)
            for column in reversed(order):
                rest = [c for c in knobs if c != column]
                if column in knobs and self.are_outcomes([column], rest):
                    knobs = rest
        return [c for c in columns if c in knobs]


def _is_function(number: np.ndarray, values: np.ndarray, sample: np.ndarray) -> bool:
    """Return whether rows of a sample with equal numbers have equal values, int64 [n] each."""
    numbered = joint_codes(sample, number)
    return int(joint_codes(numbered, values).max()) == int(numbered.max())


def _rank_within(group: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the rank of each number among the different ones of its group, int64 [n] each."""
    pairs, index = np.unique(np.stack([group, number]), axis=1, return_inverse=True)
    first = np.searchsorted(pairs[0], pairs[0])
    return (np.arange(pairs.shape[1]) - first)[index.reshape(-1)]


def _codes(columns: pl.DataFrame) -> np.ndarray:
    """Return a number for each row, int64 [n]; rows with equal values have the same."""
    return joint_codes(*map(_ranks, columns))


def _ranks(column: pl.Series) -> np.ndarray:
    """Return the rank of each value of a column among those that there are, as text, int64 [n]."""
    text = column.cast(pl.String).fill_null("")
    values = text.unique()
    # a few values are sorted faster than all rows
    if len(values) < len(text) / 2:
        return text.cast(pl.Enum(values.sort())).to_physical().to_numpy().astype(np.int64)
    return text.rank("dense").to_numpy().astype(np.int64) - 1
