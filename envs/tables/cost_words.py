"""Reword texts about latency for other costs, such as "on time" as "within the limit"."""

from __future__ import annotations

import re

from knobwise.envs.tables.units import TIMES

OF_COSTS = {
    "latency budget": "budget",
    "latency": "cost",
    "latencies": "costs",
    "on time": "within the limit",
    "a late one": "one above the limit",
    "a late answer": "an answer above the limit",
    "late answers": "answers above the limit",
    "late": "above the limit",
    "deadline": "limit",
    "deadlines": "limits",
    "on-time target": "target",
    "miss the deadline": "exceed the limit",
    "unused time": "what is left over",
    "predicted time": "predicted cost",
    "save time": "save cost",
    "determines the time": "determines the cost",
    "take the same time": "cost the same",
    "take about as long": "cost about as much",
    "the usual time": "the usual cost",
    "the whole time": "the whole cost",
    "time-outs": "capped answers",
    "faster": "cheaper",
    "fastest": "cheapest",
    "slower": "costlier",
    "slowest": "costliest",
    "as long as expected": "as much as expected",
    "the new times": "the new costs",
    "slow anyway": "costly anyway",
    "slow configurations": "costly configurations",
    "deployed, charged the time of its decisions": "deployed",
}
"""Words about times → what is said of other costs. The longest that fits is taken."""
_ANY = "|".join(sorted(map(re.escape, OF_COSTS), key=len, reverse=True))
# names of columns, keys and values of knobs stay as they are
_PHRASE = re.compile(rf"(?<![\w=/.'])(?:{_ANY})(?![\w=/'])", re.IGNORECASE)
_AS_LONG = re.compile(r"(?:take(s?)|took) ([\d.,]+) times as long")


def in_words(text: str, unit: str) -> str:
    """Return a text about latencies as one about costs in this unit; about times it stays as it
    is."""
    if unit.casefold() in TIMES:
        return text

    def of_cost(match: re.Match[str]) -> str:
        words = OF_COSTS[match[0].lower()]
        return words[:1].upper() + words[1:] if match[0][0].isupper() else words

    return _PHRASE.sub(of_cost, _AS_LONG.sub(r"cost\1 \2 times as much", text))
