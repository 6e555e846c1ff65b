"""Say what the log of a deployed controller holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from knobwise.agents.learning.faults import faults_by_setting
from knobwise.agents.learning.logged import ReadLog, read_log
from knobwise.agents.learning.times import times_by_setting
from knobwise.common.words import setting
from knobwise.envs.tables.units import MS

LOGGED = ("met", "accuracy", "choice", "best", "explored", "controller")
"""The columns of a log that shares are taken of."""


def facts_of_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the times of the settings of a log, see `times_by_setting`, as plain values."""
    return [
        times._asdict() | {name: getattr(times, name) for name in ("off", "changed", "far")}
        for times in times_by_setting(rows)
    ]


def facts_of_limits(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return of how many rows of a log it is known whether a further cost is above its limit, and
    of how many it is."""
    known = [row["over_limit"] for row in rows if "over_limit" in row]
    return {"known": len(known), "over": sum(known)}


def facts_of_faults(log: ReadLog) -> list[dict[str, Any]]:
    """Return the settings of a log that gave no answer to some requests, see `faults_by_setting`,
    as plain values."""
    return [faults._asdict() for faults in faults_by_setting(log.attempts)]


def inspect_log(folder: str) -> dict[str, object]:
    """Return the facts about a log, as plain values for JSON.

    Returns:
        `requests`: their number. `on_time`, `labelled`, `explored`: shares of them, the last of
        those whose configuration was drawn, perhaps the best; of older rows those that another
        answered. `accuracy`: mean over the labelled; `fractional`: whether one is neither 0 nor 1.
        `times`: `SettingTimes` of each frequent setting, `off`, `changed` and `far`. `unit`: of
        these times.
        `without_answer`: `SettingFaults` of each setting that failed.
        `over_limit`: see `facts_of_limits`; what is above a limit counts as late.
        `abandoned`: requests that nobody waited for until their deadline was over; they count as
        late. `configurations`: label → requests. `controllers`: digest → requests. `unlike`:
        requests unlike those of training, by a text or by what a block lacks. `set_aside`:
        reason → rows.

    Raises:
        InputError: there is no log in the folder.
    """
    log = read_log(folder)
    rows = pl.DataFrame(log.rows, schema=dict.fromkeys(LOGGED), infer_schema_length=None)
    labelled = pl.col("accuracy").is_not_null()
    shares = rows.select(
        on_time=pl.mean("met"),
        labelled=labelled.mean(),
        explored=pl.coalesce("explored", pl.col("choice") != pl.col("best")).mean(),
    )
    return {
        "log": folder,
        "requests": len(rows),
        # an empty log has shares of 0
        **shares.fill_null(0.0).row(0, named=True),
        "accuracy": rows["accuracy"].mean(),
        "fractional": bool((rows["accuracy"].cast(pl.Float64) % 1 > 0).any()),
        "configurations": dict(Counter(setting(row["knobs"]) for row in log.rows).most_common()),
        "times": facts_of_times(log.rows),
        "unit": next((row["unit"] for row in log.rows if "unit" in row), MS),
        "without_answer": facts_of_faults(log),
        "controllers": dict(Counter(rows["controller"])),
        "over_limit": facts_of_limits(log.rows),
        "abandoned": sum(bool(row.get("abandoned")) for row in log.rows),
        "unlike": sum(bool(row.get("unlike")) for row in log.rows),
        "set_aside": dict(log.aside),
    }
