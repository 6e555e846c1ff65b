"""Say what the log of a deployed controller holds."""

from __future__ import annotations

from collections import Counter

import polars as pl

from knobwise.agents.learning.logged import read_log
from knobwise.common.words import setting

LOGGED = ("met", "accuracy", "choice", "best", "controller")
"""The columns of a log that shares are taken of."""


def inspect_log(folder: str) -> dict[str, object]:
    """Return the facts about a log, as plain values for JSON.

    Returns:
        `requests`: their number. `on_time`, `labelled`, `explored`: shares of them, the last of
        those that were not answered by the best choice. `accuracy`: mean over the labelled;
        `fractional`: whether one is neither 0 nor 1.
        `configurations`: label → requests. `controllers`: digest → requests. `unlike`: requests
        whose text is unlike those of training. `set_aside`: reason → rows.

    Raises:
        InputError: there is no log in the folder.
    """
    log = read_log(folder)
    rows = pl.DataFrame(log.rows, schema=dict.fromkeys(LOGGED), infer_schema_length=None)
    labelled = pl.col("accuracy").is_not_null()
    shares = rows.select(
        on_time=pl.mean("met"),
        labelled=labelled.mean(),
        explored=(pl.col("choice") != pl.col("best")).mean(),
    )
    return {
        "log": folder,
        "requests": len(rows),
        # an empty log has shares of 0
        **shares.fill_null(0.0).row(0, named=True),
        "accuracy": rows["accuracy"].mean(),
        "fractional": bool((rows["accuracy"].cast(pl.Float64) % 1 > 0).any()),
        "configurations": dict(Counter(setting(row["knobs"]) for row in log.rows).most_common()),
        "controllers": dict(Counter(rows["controller"])),
        "unlike": sum(bool(row.get("unlike")) for row in log.rows),
        "set_aside": dict(log.aside),
    }
