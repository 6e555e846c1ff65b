"""How many tokens an answer took, as the server says it in `usage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_TOKENS = 1_000_000_000
"""No request takes more; a server that says so is wrong."""
READ = ("prompt_tokens", "input_tokens")
"""The names that chat completions and /v1/responses have for the tokens that a model reads."""
WRITTEN = ("completion_tokens", "output_tokens")
"""The same for those that it writes."""
DETAILS = ("prompt_tokens_details", "input_tokens_details")
CACHED = ("cached_tokens",)
CUT = 5
"""Where so many prompts all have the largest number of tokens, a server cuts prompts there, …"""
LONGER = 1.5
"""… if the longest of them has more letters than the shortest by this factor."""


class TokenCounts(NamedTuple):
    """The tokens of an answer."""

    read: int
    written: int
    """Those of thinking included."""
    cached: int = 0
    """How many of `read` the server had in its cache."""


def count_tokens(usage: object) -> TokenCounts | None:
    """Read the tokens of an answer; None where the server did not count them.

    Some servers count tokens of thinking in `total_tokens` alone, so that `written` is at least the
    total without those that were read.

    Raises:
        ValueError: a count that is negative, no whole number or beyond `MOST_TOKENS`, or more
            tokens from the cache than were read.
    """
    if usage is None or usage == {}:
        return None
    if not isinstance(usage, Mapping):
        raise ValueError(f"usage={_short(usage)} is no object")
    read = _first(usage, READ)
    written = _first(usage, WRITTEN)
    total = _first(usage, ("total_tokens",))
    if read is None or (written is None and total is None):
        return None
    written = max(written or 0, (total or 0) - read)
    cached = 0
    for details in _details(usage):
        cached = _first(details, CACHED) or cached
    if cached > read:
        raise ValueError(f"cached_tokens={cached} is more than the {read} tokens that were read")
    return TokenCounts(read, written, cached)


def cut_at(letters: Sequence[int], tokens: Sequence[float]) -> int | None:
    """Return at how many tokens a server cuts prompts, as some do without a word where a context is
    full; None where nothing shows that it cuts any.

    Args:
        letters: how long the prompts are.
        tokens: how many each had for the server; NaN where it did not count them.
    """
    counted = {pair for pair in zip(letters, tokens, strict=True) if pair[1] == pair[1]}
    most = max((count for _, count in counted), default=0.0)
    longest = sorted(length for length, count in counted if count == most)
    if len(longest) < CUT or longest[-1] < LONGER * longest[0]:
        return None
    return int(most)


def cut_line(most: int) -> str:
    """Return what to say of a server that seems to cut prompts at so many tokens."""
    return (
        f"the longest prompts differ in length, but all have {most} tokens for the server: it "
        "seems to cut them there without a word; let it read longer ones (num_ctx of Ollama, the "
        "context length of others), and measure into another folder"
    )


def names_cached_tokens(usage: Mapping[str, Any]) -> bool:
    """Return True if the server says how many tokens came from its cache, be it none."""
    return any(details.get(CACHED[0]) is not None for details in _details(usage))


def _details(usage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what the server says of the tokens that were read."""
    details = [usage.get(name) for name in DETAILS]
    return [fields for fields in details if isinstance(fields, Mapping)]


def _first(counts: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Return the first of some counts that is there. Raises ValueError for one that cannot be."""
    for name in names:
        value = counts.get(name)
        if value is None:
            continue
        # first the range, since neither NaN nor infinity is a whole number
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 <= value <= MOST_TOKENS and value == int(value):
            return int(value)
        raise ValueError(f"{name}={_short(value)} is no number of tokens")
    return None


def _short(value: object) -> str:
    """Return a value as text that fits into a line."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
