"""Units of what a budget limits, and of further costs.

Times are kept in ms, whatever the unit of their file. Any other cost, such as a price, tokens or
energy, keeps its unit: it is no time, so nothing that reads a clock can be compared with it. This
module imports no torch.
"""

from __future__ import annotations

import re

from knobwise.common.errors import InputError

MS = "ms"
TIMES = {
    **dict.fromkeys(("ns", "nsec", "nanos", "nanosecond", "nanoseconds"), 1e-6),
    # of the two letters for micro, `casefold` leaves the Greek one
    **dict.fromkeys(("us", "usec", "μs", "micros", "microsecond", "microseconds"), 1e-3),
    **dict.fromkeys((MS, "msec", "millis", "millisecond", "milliseconds"), 1.0),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1e3),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 6e4),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3.6e6),
    **dict.fromkeys(("d", "day", "days"), 8.64e7),
}
"""Spelling of a unit of time → its length in ms."""
UNITS = {
    **dict.fromkeys(("usd", "dollars"), "USD"),
    **dict.fromkeys(("eur", "euros"), "EUR"),
    **dict.fromkeys(("j", "joule", "joules"), "J"),
    **{
        unit.casefold(): unit for unit in ("mJ", "kJ", "Wh", "kWh", "MB", "GB", "s", "ms", "tokens")
    },
}
"""Last word of the name of a cost, in lower case → its unit."""
UNSURE = ("min", "h", "d")
"""Units of time that a name may end in for another reason: a minimum, high, a dimension."""
STATISTIC = re.compile(
    r"mean|avg|average|med(ian)?|p\d+|(percent|quant)ile|total|sum|max(imum)?|min(imum)?|overall"
)
"""Words that may stand behind a unit in a name, as in `latency_s_mean`."""


def kept_as(unit: str) -> tuple[str, float]:
    """Return the unit in which costs are kept, and the factor that they are multiplied by: `ms` and
    the length of a unit of time in ms, or any other unit and 1.

    Raises:
        InputError: no text, or an empty one.
    """
    name = unit.strip() if isinstance(unit, str) else ""
    if not name:
        raise InputError(f"unit={unit!r}: must be text, such as ms, s or USD")
    factor = TIMES.get(name.casefold())
    return (name, 1.0) if factor is None else (MS, factor)


def own_unit(column: str) -> str | None:
    """Return the unit that a column's name ends in, such as `s` of `latency_s`, `durationSec` or
    `latency_s_p50`, or `usd`; None if it names none for sure."""
    word = _unit_word(column)
    return None if word in UNSURE else word


def _unit_word(column: str) -> str | None:
    """Return the last word of a column's name that is a unit, or None; only names of statistics may
    stand behind it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.rstrip(")] ")).casefold()
    prices = ("usd", "eur", "dollars", "cost", "price", "tokens")
    for word in _before_statistics(re.split(r"[\W_]+", words)):
        if word in TIMES or word in prices:
            return word
    return None


def _before_statistics(words: list[str]) -> list[str]:
    """Return the words of a name from the last one that names no statistic on."""
    first = len(words) - 1
    while first > 0 and STATISTIC.fullmatch(words[first]):
        first -= 1
    return words[first:]


def unit_in(name: str) -> str:
    """Return the unit that the name of a cost ends in, such as J of `energy_j`; "" for none."""
    words = _before_statistics(re.split(r"[\W_]+", name.casefold().rstrip(")] ")))
    return next((UNITS[word] for word in words if word in UNITS), "")


def in_other_unit(column: str) -> bool:
    """Return whether a column's name ends in a unit other than ms, such as `latency_s` or `usd`, or
    in what may be one, such as `duration_min`."""
    unit = _unit_word(column)
    return unit is not None and TIMES.get(unit) != 1


def check_kept(name: str, unit: str) -> None:
    """Refuse the unit of a table, called `name`, if it is one of time other than ms.

    Raises:
        InputError: it is, or is no text.
    """
    if kept_as(unit)[0] != unit:
        raise InputError(
            f"{name}: is in {unit}, but times are kept in ms; read its file again with "
            f"unit={unit}, which converts them"
        )


def check_time(user: str, unit: str) -> None:
    """Refuse a cost that is no time.

    Args:
        user: what measures time, for the message.
        unit: of the budgets.

    Raises:
        InputError: the unit is not ms.
    """
    if unit != MS:
        raise InputError(
            f"{user}: measures time, but the budgets of this controller are in {unit}; "
            "decide(features, budget_ms=…) takes them in this unit"
        )
