"""What columns of accuracies and costs count.

The unit of a cost is what another column says, such as `time_unit` beside `real_time`, or its own
values. Which way is better names say: accuracies must rise with quality, costs fall with speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.column_names import UNITS, list_columns, named_like, plain_name
from knobwise.envs.readers.column_values import glimpse, number_column
from knobwise.envs.tables.units import MS, TIMES, in_other_unit, kept_as, own_unit

OF_ANY_TIME = ("", "time", "latency", "duration", "runtime", "cost")
"""What stands before `unit` in the name of a column that may be about any cost."""
SPAN = (
    r"^(?:(?P<days>\d+) days?,? )?"
    r"(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d(?:\.\d+)?)$"
)
"""A span of time as pandas and Python write it, such as `0 days 00:00:01.25`."""
PARTS_MS = {"days": 8.64e7, "hours": 3.6e6, "minutes": 6e4, "seconds": 1e3}
"""The parts of a span of time, in ms."""
NS_PER_MS = 1e6
LOWER_IS_BETTER = re.compile(
    r"(.*_)?([wcmt]er|(err|error|loss|mistake|failure|miss|hallucination)(s|es)?|(r|m|rm|n|nrm)?[ms]se"
    r"|rmsle|mae|mape|smape|regret|perplexity|ppl|nll|neg_?log_?likelihood|bpb|bits_per_byte|brier"
    r"|(cross_?)?entropy|(edit|levenshtein|hamming)(_distance)?|distance|divergence|deviation"
    r"|residuals?)"
    r"(_(rate|ratio|count|score|value|mean|avg|average|median|sum|total|norm|normalized|pct|percent"
    r"|all|overall|\d+))*"
    r"|((mean|total|avg|average)_)?costs?"
)
"""Names of measures that are better the lower they are."""
TURNED = re.compile(
    r"(.*_)?(neg|negative|minus|inv|inverse|inverted|no|non|without|free|reduction|avoided|one_minus|1)"
    r"_.*|.*_(free|reduction|avoided)(_.*)?"
)
"""Names of such a measure that was turned round."""
RATES = re.compile(
    r"(.*_)?(fps|qps|rps|tps|ips|throughput|speed|speed_?up|bandwidth|goodput"
    r"|(\w+_)?per_(s|sec|second|min|minute|h|hour)"
    r"|(tok|toks|tokens|it|its|iter|iters|iterations|frames?|images?|req|reqs|requests?|samples?|ops"
    r"|steps?|queries|items?)_(s|sec|second))"
    r"(_(mean|avg|average|median|p\d+|total|overall))*"
)
"""Names of costs that are better the higher they are."""
PRICES = re.compile(r"(.*_)?(usd|eur|dollars?|euros?|cents?|cost|price|joules?|energy)_per_.*")
"""Names of rates of which less is better."""


def in_one_unit(
    frame: pl.DataFrame, cost: str, unit: str, notes: list[str]
) -> tuple[pl.DataFrame, str]:
    """Return the rows with the cost in one unit, and that unit: the one that is given, unless a
    column names the unit of each row, or the cost holds spans of time; where none is given, the
    unit of time that the name of the cost ends in.

    Args:
        frame: rows with the column `cost`.
        cost: the column that the budget limits.
        unit: the unit that was asked for; `ms` may mean that nothing was.
        notes: what is noticed.

    Raises:
        InputError: the column contradicts `unit` or the name of the cost, is empty beside a cost,
            or names several units that cannot be converted; or spans of time have no unit of time.
    """
    spans = _spans_in_ms(frame[cost])
    if spans is not None:
        if kept_as(unit)[0] != MS:
            raise InputError(f"unit={unit}: {cost} holds spans of time; leave unit= out")
        notes.append(f"{cost}: spans of time, kept in ms; budgets are in ms")
        return frame.with_columns(spans), MS
    name = _unit_column(frame, cost)
    # a price for each hour is no time
    in_name = None if PRICES.fullmatch(cost.casefold()) else own_unit(cost)
    if unit == MS and in_name in TIMES:
        unit = in_name
    if name is None:
        return frame, unit
    words = frame[name].cast(pl.String).str.strip_chars()
    numbers = number_column(frame[cost], False).fill_nan(None)
    known = words.filter(numbers.is_not_null())
    units = known.drop_nulls().unique().sort().to_list()
    factors = {word: TIMES.get(word.casefold()) for word in units}
    times = [word for word in units if factors[word] is not None]
    if not units or (in_name and not times):
        return frame, unit
    listing = list_columns(units)
    if known.null_count():
        raise InputError(
            f"column {name} names the unit of {cost}, but is empty in {known.null_count()} rows; "
            "fill it in"
        )
    if len(units) > 1 and len(times) < len(units):
        raise InputError(
            f"column {name}: {cost} is in {listing}, which cannot be converted into each other; "
            "keep the rows of one unit"
        )
    wanted = unit if unit != MS else in_name
    if wanted and {_length(wanted)} != {_length(word) for word in units}:
        raise InputError(
            f"{cost} is in {wanted}, but column {name} says {listing}; rename the column that is "
            "wrong"
        )
    if not times:
        notes.append(f"{cost}: in {listing}, as column {name} says")
        return frame, units[0]
    notes.append(f"{cost}: read in {listing}, as column {name} says, kept in ms; budgets are in ms")
    factor = words.replace_strict(factors, default=None, return_dtype=pl.Float64)
    return frame.with_columns((numbers * factor).alias(cost)), MS


def unit_of_wide(costs: Sequence[str | float] | None, unit: str, notes: list[str]) -> str:
    """Return the unit of the costs of a wide table: the given one, or where none is given the unit
    of time that the names of all their columns end in.

    Args:
        costs: a column, or a number, for each configuration.
        unit: the unit that was asked for; `ms` may mean that nothing was.
        notes: what is noticed.

    Raises:
        InputError: the names end in several units of time, or one is a rate.
    """
    names = [cost for cost in costs or () if isinstance(cost, str)]
    for name in names:
        check_costs(name, unit, [], notes)
    if unit != MS or not names:
        return unit
    last_words = [None if PRICES.fullmatch(n.casefold()) else own_unit(n) for n in names]
    times = list(dict.fromkeys(word for word in last_words if word in TIMES))
    if len({TIMES[time] for time in times}) > 1:
        raise InputError(
            f"wide_latency={list_columns(names)}: the names end in several units, "
            f"{list_columns(times)}; write all in one, or say which it is with unit= (unit=msec "
            "for ms)"
        )
    # the s of lat_s beside lat_m is a size
    if len(names) == len(costs or ()) and all(word in TIMES for word in last_words):
        if TIMES[times[0]] != 1:
            listing = list_columns(names)
            notes.append(f"{listing}: read in {times[0]}; if the names are wrong, unit=msec is ms")
        return times[0]
    if others := [name for name in names if in_other_unit(name)]:
        notes.append(
            f"{list_columns(others)}: read in ms; if it is in another unit, unit=… says so"
        )
    return unit


def note_unit(latency: str, unit: str, notes: list[str]) -> None:
    """Note if times were converted to ms, or if the name of their column speaks of another unit."""
    kept, factor = kept_as(unit)
    if factor != 1:
        words = f"{latency}: read in {unit}, kept in ms; all budgets are in ms"
        if own_unit(latency) == unit:
            words += "; if the name is wrong, unit=msec says that it is in ms"
        notes.append(words)
    elif kept == MS and in_other_unit(latency):
        notes.append(f"{latency}: read in ms; if it is in another unit, unit=… says so")


def _spans_in_ms(column: pl.Series) -> pl.Series | None:
    """Return spans of time in ms, float64, null where there is none; None if these are no spans."""
    if column.dtype == pl.Duration:
        return column.dt.total_nanoseconds().cast(pl.Float64) / NS_PER_MS
    if column.dtype != pl.String or not glimpse(column).str.contains(":", literal=True).any():
        return None
    text = column.str.strip_chars()
    text = text.set(text.is_in(["", "NaT"]), None)
    is_span = text.str.contains(SPAN)
    if not is_span.any() or not is_span.drop_nulls().all():
        return None
    parts = text.str.extract_groups(SPAN).struct.unnest().cast(pl.Float64)
    lengths = [pl.col(part).fill_null(0.0) * ms for part, ms in PARTS_MS.items()]
    whole = parts.select(pl.sum_horizontal(lengths).alias(column.name)).to_series()
    return whole.set(is_span.is_null(), None)


def measures_with_units(columns: Sequence[str]) -> list[str]:
    """Return those of these columns that another one gives a unit, as `latency.unit` does to
    `latency.value`: whoever writes so has measured."""
    stems = {name: re.sub(r"(?<=[./|])values?$", "", name) for name in columns}
    return [name for name, stem in stems.items() if stem != name and f"{stem}unit" in columns]


def _length(unit: str) -> tuple[str, float]:
    """Return what tells two units apart."""
    kept, factor = kept_as(unit)
    return kept.casefold(), factor


def _unit_column(frame: pl.DataFrame, cost: str) -> str | None:
    """Return the text column that names the unit of a cost: the one whose name has most in common
    with it."""
    best = None
    longest = -1
    for name in named_like(frame.columns, UNITS):
        about = plain_name(name).removesuffix("s").removesuffix("unit").rstrip("_")
        fits = about in OF_ANY_TIME or plain_name(cost).startswith(about)
        if fits and frame[name].dtype == pl.String and len(about) > longest:
            best = name
            longest = len(about)
    return best


def counts_errors(name: str) -> bool:
    """Return whether the name of a measure says that lower is better."""
    words = plain_name(name)
    return bool(LOWER_IS_BETTER.fullmatch(words)) and not TURNED.fullmatch(words)


def is_rate(name: str) -> bool:
    """Return whether the name of a cost, or its unit, says that higher is better."""
    words = plain_name(name)
    if PRICES.fullmatch(words):
        return False
    return bool(RATES.fullmatch(words)) or words in ("hz", "khz", "1_s")


def check_costs(latency: str, unit: str, costs: Sequence[str], notes: list[str]) -> None:
    """Refuse a cost that by its name or unit is a rate, such as frames per second; note which of
    the further costs are.

    Raises:
        InputError: with the formula to write.
    """
    for what, name in ((latency, latency), (f"unit={unit}", unit)):
        if is_rate(name):
            raise InputError(
                f"{what}: lower must be better, but this is a rate, of which more is better: write "
                f"the time that one takes, such as 1000 / {latency} in ms"
            )
    if rates := [name for name in costs if is_rate(name)]:
        notes.append(
            f"costs={', '.join(rates)}: more is better by the name, but limits are upper limits; "
            f"1 / {rates[0]} would be a cost"
        )


def check_accuracies(names: Sequence[str], unit: str, rows: pl.DataFrame, notes: list[str]) -> None:
    """Refuse accuracies that by their names count errors, whatever their range.

    Where slower settings of the same samples have more of it, it may be a score, whatever its name,
    and a note says so; not where it is above 1, as no accuracy is.

    Args:
        names: the columns of the accuracies in the file.
        unit: in which they are there, `share` or `percent`.
        rows: `sample_id`, optionally `dataset`; `accuracy`, which is one if from 0 to 1; `latency`.
        notes: what is noticed.

    Raises:
        InputError: with the formula to write.
    """
    wrong = [name for name in names if counts_errors(name)]
    if not wrong:
        return
    # samples that are hard take longer and have more errors, so each is compared with itself
    keys = [c for c in ("dataset", "sample_id") if c in rows.columns]
    above = [pl.col(c) - pl.col(c).mean().over(keys) for c in ("accuracy", "latency")]
    agree = rows.select(pl.corr(*above, method="spearman")).item()
    listed = ", ".join(wrong)
    (name, *_) = wrong
    above_one = bool((rows["accuracy"] > 1 + 1e-6).any())
    if not above_one and agree is not None and agree > 0.1:
        notes.append(
            f"accuracy={listed}: taken as it is, since slower settings have more of it; if it "
            f"counts errors, write {_turned(name, unit, above_one)}"
        )
        return
    raise InputError(
        f"accuracy={listed}: higher must be better, but by its name less of it is better: write "
        f"{_turned(name, unit, above_one)}. If higher is better, rename the column"
    )


def _turned(name: str, unit: str, above_one: bool) -> str:
    """Return the formula that makes an accuracy of such a measure."""
    if unit == "percent":
        return f"100 - {name}"
    if above_one:
        return f"1 / (1 + {name}), or 1 - {name} / 100 if it is in per cent"
    return f"1 - {name}, or 1 / (1 + {name}) if it can be above 1"
