"""Numbers and configurations in words, for what is printed, logged and shown on pages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard


def is_known(value: object) -> TypeGuard[float]:
    """Return whether this is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def format_number(value: object, how: str) -> str:
    """Format a number, for example with ".3f" or "+.1%"; return a dash if it is not known. What is
    rounded to 0 has no sign."""
    if not is_known(value):
        return "–"
    plain = f"{value:z{how.removeprefix('+')}}"  # z: no −0.0
    if how.startswith("+") and value > 0 and re.search("[1-9]", plain):
        return f"+{plain}"
    return plain


def quantity(value: object, unit: str = "ms") -> str:
    """Format a number and its unit, with three significant figures, or with all digits before the
    point from 100 on."""
    if not is_known(value):
        return "–"
    # some files keep only six figures of a budget: rounding to six first makes 2.185 look the same
    # from every file
    rounded = float(f"{value:.6g}")
    # "#" keeps trailing zeros, and also a point at the end
    figures = re.sub(r"e([+-])0*", r"e\1", f"{rounded:#.3g}").rstrip(".")
    if abs(value) >= 100:
        figures = f"{value:,.0f}"
    return f"{figures} {unit}".rstrip()


def points(share: object, how: str = "+.1f") -> str:
    """Format a share in points (hundredths); return a dash if it is not known."""
    if not is_known(share):
        return "–"
    return format_number(100 * share, how)


def format_count(count: int, noun: str) -> str:
    """Return a number of things in words, such as `1 request` and `1,000 requests`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def join_words(words: Sequence[str]) -> str:
    """Join words with commas and "and"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def spelled(value: Any) -> Any:
    """Return a knob's value with true and false as text, as YAML, JSON and most files spell them,
    and as knobs had them in earlier versions; any other value as it is."""
    return str(value).lower() if isinstance(value, bool) else value


def setting(knobs: Mapping[str, object]) -> str:
    """Return a configuration in words: `crops=2, mode=fast, cache=true`."""
    return ", ".join(f"{name}={spelled(value)}" for name, value in knobs.items())
