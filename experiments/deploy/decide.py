"""Decide for the requests in a file: their features and budgets in, knob values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from knobwise.agents.deployed.arrays import Array
from knobwise.agents.deployed.controller import MAX_MS, NumpyController
from knobwise.common.errors import InputError, naming
from knobwise.common.files import written_whole
from knobwise.common.progress import say
from knobwise.common.words import format_count
from knobwise.envs.readers.column_values import refuse_lost_digits
from knobwise.envs.readers.feature_columns import encode, numbers_in
from knobwise.envs.readers.frames import Lines, read_frame, with_chats
from knobwise.envs.readers.nested import unnest
from knobwise.envs.tables.columns import FEATURES, Column, columns_of
from knobwise.experiments.evidence.run_folder import controller_at
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.deployment_options import DecideRun
from knobwise.serving.inputs import limit_in_request

AT_ONCE = 50_000
"""Rows that are decided together; so many features and outcomes take little memory."""
ROUNDING = 1e-6
"""By how much, as a share, a budget may lie outside of those that were tested."""
SOME_REFUSED = 3
"""The exit status if some rows were refused."""


def decide_requests(config: DecideRun) -> int:
    """Write the decisions for all requests that can be decided, list the others on stderr, and
    return the exit status: 0, or `SOME_REFUSED`.

    Raises:
        InputError: no such checkpoint or file, a budget that is not positive, or a feature that no
            request has; nothing is written then.
    """
    path = Path(config.requests)
    out = Path(config.out)
    if out.suffix != ".csv" or out.resolve() == path.resolve():
        raise InputError(f"out={out}: must be a .csv file, and not that of the requests")
    controller = controller_at(config.checkpoint, config.rule)
    # the same file gets the same decisions, also from a static mix
    controller.budgets.start_over(1)
    if config.budget_ms is not None:
        limit_in_request(config.budget_ms, controller.unit)
    knobs = [controller.configuration(i) for i in range(len(controller.configurations))]
    settings = pl.DataFrame(knobs, infer_schema_length=None)
    # the budgets that the controller was tested at, where it has a guard or a promise
    trained_ms = controller.trained_ms
    tried = np.array([0, np.inf]) if trained_ms is None else trained_ms
    if controller.promise is not None:
        # a promise has rules at smaller budgets, too
        tried = np.append(tried, controller.promise.budgets_ms)
    # they are kept in float32, and typed as they are printed
    least, most = (1 - ROUNDING) * tried.min(), (1 + ROUNDING) * tried.max()
    # the column of ids in training, too
    ids = ["sample_id", of_run(config.checkpoint, "profile.id")]
    notes = list[str]()
    lines = Lines()
    # the names inside objects are those of a profile
    frame = unnest(read_frame(path, notes, lines))
    for note in notes:
        say(note)
    refused = dict(lines.refused)
    total = len(frame) + len(refused)
    if not total:
        raise InputError(f"{path}: holds no requests")
    untried = 0
    unlike = 0
    beyond = 0
    by_feature = Counter[str]()
    dear = 0
    with written_whole(out) as temporary, temporary.open("wb") as file, naming(path):
        for first in range(0, max(len(frame), 1), AT_ONCE):
            part = frame.slice(first, AT_ONCE)
            limits, chosen, faults, odd, outside, above = _decided(controller, part, config)
            outside_any = np.logical_or.reduce([np.zeros_like(odd), *outside.values()])
            unlike += int((odd & ~outside_any).sum())
            beyond += int(outside_any.sum())
            by_feature.update({name: int(rows.sum()) for name, rows in outside.items()})
            dear += int(above.sum())
            number_of_line = pl.Series("line", lines.numbers[first : first + AT_ONCE])
            names = _ids(part, ids, [*settings.columns, "line", limits.name])
            named = pl.DataFrame([number_of_line, *names, limits])
            good = faults.is_null()
            decided = pl.concat([named.filter(good), settings[chosen]], how="horizontal")
            if controller.promise is not None:
                # the share of such requests that is promised to be on time; budgets are whole
                shares = controller.promise.shares_at(decided["budget_ms"].to_numpy())
                # nothing of what is unlike the profile, as in service
                shares = np.where(odd, 0.0, shares)
                decided = decided.with_columns(promised=pl.Series(shares, dtype=pl.Float64))
            decided.write_csv(file, include_header=not first)
            untried += int((~decided["budget_ms"].is_between(least, most)).sum())
            refused |= pl.DataFrame([named["line"], faults]).filter(~good).iter_rows()
    # the others are listed, as compilers do
    for line in sorted(refused):
        say(f"{path}:{line}: {refused[line]}")
    print(f"decided: {total - len(refused)} of {total} requests, in {out}")
    if untried:
        say(
            f"{format_count(int(untried), 'budget')} outside {tried.min():.4g} to "
            f"{tried.max():.4g} {controller.unit}, the range that this controller was tested on; "
            "do not rely on the decisions there"
        )
    if unlike:
        words = "as if they lacked it" if controller.static is None else "by budget-aware static"
        if controller.promise is not None:
            words = "without features, and promised nothing"
        say(
            f"{format_count(unlike, 'request')} with a text unlike those of training, or without a "
            f"number that all of these have: decided {words}"
        )
    if beyond:
        ((name, count),) = by_feature.most_common(1)
        say(
            f"{format_count(beyond, 'request')} outside the range of training, widened by "
            f"{controller.header['margin']:.2g} of it, most often by {name} ({count:,}): decided "
            "without features, and promised nothing"
        )
    if dear:
        say(
            f"{format_count(dear, 'request')} for which no configuration is expected to keep "
            f"{controller.limits.words()}: the cheapest is taken"
        )
    return SOME_REFUSED if refused else 0


def _ids(frame: pl.DataFrame, ids: Sequence[str | None], written: Sequence[str]) -> list[pl.Series]:
    """Return the columns of ids that a frame has, but none that is written anyway.

    Raises:
        InputError: ids have lost digits.
    """
    columns = [frame[name] for name in frame.columns if name in ids and name not in written]
    for column in columns:
        refuse_lost_digits(column)
    return columns


def _decided(
    controller: NumpyController, frame: pl.DataFrame, config: DecideRun
) -> tuple[pl.Series, Array, pl.Series, Array, dict[str, Array], Array]:
    """Decide for the rows of a frame.

    Returns:
        The budget of each row, the configurations of those that are not refused, for each row why
        it is refused, null for nothing; and of those that are not refused, which are unlike those
        of training, which of these by the number of which feature (`NumpyController.outside`), and
        for which no configuration is expected to keep the limits, bool each.

    Raises:
        InputError: a column is missing.
    """
    faults = []
    blocks = {}
    for name in controller.feature_sizes:
        blocks[name], wrong = _block(controller, frame, name)
        faults.append(wrong)
    limits = _limits(frame, config)
    valid = (limits > 0) & (limits < MAX_MS)
    valid &= pl.Series(controller.budgets.known(limits.to_numpy()))
    reason = controller.budgets.refusal
    wrong_budget = pl.when(~valid.fill_null(False)).then(pl.lit(reason))
    # the first fault of a row is given
    fault = pl.select(fault=pl.coalesce(*faults, wrong_budget))["fault"]
    good = fault.is_null().to_numpy()
    features = {name: block[good] for name, block in blocks.items()}
    chosen = controller.choose(features, limits.to_numpy()[good])
    odd = controller.unlike(features, int(good.sum()))
    outside = controller.outside(features, len(odd))
    above = ~controller.allowed(features, len(odd))[1]
    return limits, chosen, fault, odd, outside, above


def _limits(frame: pl.DataFrame, config: DecideRun) -> pl.Series:
    """Return the budget of each row, float64 `budget_ms`; −1 for what is no number, null for
    none."""
    budget = pl.lit(config.budget_ms, pl.Float64)
    if "budget_ms" in frame.columns:
        present = pl.col("budget_ms").cast(pl.String).fill_null("") != ""
        known = numbers_in("budget_ms", frame.schema["budget_ms"]).fill_null(-1.0)
        budget = pl.when(present).then(known).otherwise(budget)
    elif config.budget_ms is None:
        raise InputError("no column budget_ms; give budget_ms=…")
    return frame.with_columns(budget_ms=budget)["budget_ms"]


def _block(controller: NumpyController, frame: pl.DataFrame, name: str) -> tuple[Array, pl.Series]:
    """Return a feature block of the rows, and what is wrong with each, null for nothing.

    A block is a column of lists, or named columns, or without names columns such as `name[0]`.
    """
    width = controller.feature_sizes[name]
    columns: Sequence[Column] = [Column(f"{name}[{i}]", None, True) for i in range(width)]
    frame = with_chats(frame)
    if name in controller.texts and not frame.schema.get(name, pl.List).is_nested():
        texts = frame[name].cast(pl.String).to_list()
        rows = [controller.texts[name](text) for text in texts]
        return np.reshape(rows, (len(rows), width)), pl.repeat(None, len(rows), eager=True)
    if name in frame.columns and frame.schema[name].is_nested():
        try:
            lists = frame[name].cast(pl.Array(pl.Float64, width))
        except pl.exceptions.PolarsError as error:
            raise InputError(f"{name} must hold {width} numbers in each row") from error
        values = [lists.arr.get(i).alias(column.name) for i, column in enumerate(columns)]
        frame = pl.DataFrame(values)
    elif name == FEATURES and controller.columns:
        columns = columns_of(controller.columns)
    elif name == "dataset" and controller.datasets:
        # one that training did not see has a place beyond the block
        columns = [Column(name, tuple(controller.datasets), True)]
    elif columns[0].name not in frame.columns:
        text = f"a column {name} of text, or " * (name in controller.texts)
        raise InputError(
            f"features {name} are missing. Add {text}columns {name}[0] … {name}[{width - 1}], or "
            "one column of lists (Parquet)"
        )
    block, faults = encode(frame, columns)
    return block[:, :width], faults
