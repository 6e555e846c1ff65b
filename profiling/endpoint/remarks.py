"""What the measurements of a profile say about the server: knobs that it may ignore, changes of the
model that are in the times, prompts that it had in its cache or cut, thoughts in its answers, and
tokens that it did not count.
Hints, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import polars as pl

from knobwise.profiling.endpoint.model_changes import costs_something, say_costs
from knobwise.profiling.endpoint.settings import LENGTHS
from knobwise.profiling.endpoint.token_counts import cut_at, cut_line
from knobwise.profiling.measuring.adaptive_model import KnobSupport
from knobwise.profiling.measuring.answer_metrics import END_OF_THOUGHT, THOUGHT, holds_thoughts
from knobwise.profiling.measuring.measuring import EXTRA, MeasurementPlan
from knobwise.profiling.measuring.outputs import values_in_order

LEAST_SAMPLES = 4
"""Fewer samples say nothing of a knob."""
SAME_TIME = 0.1
"""Times that differ by less are the same."""
LONGER = 1.1
"""An answer is longer than its limit if it has more tokens by this factor, and by two."""
CACHED = 0.02
"""A larger share of the input tokens from the cache is told."""
CHANGED = "model_changed"
"""The number beside an answer that tells whether the request before it was to another model."""
CHANGE_MS = "model_change_ms"
"""The number beside an answer that tells what a change to its model costs, where it does."""


def ignored_knobs(
    plan: MeasurementPlan, log: pl.DataFrame, knobs: Sequence[KnobSupport]
) -> list[str]:
    """Return a line for each knob whose two ends make no difference that the log shows, all other
    knobs being equal: neither to the letters of the answers nor to tokens, prices or times. Of a
    limit of the tokens it is a line if most answers are longer than its lower end.

    Args:
        plan: what is measured.
        log: all measurements; those that failed are left out.
        knobs: of the model.
    """
    rows = plan.select(log).filter(repeat=0)
    if EXTRA + "failed" in rows.columns:
        rows = rows.filter(pl.col(EXTRA + "failed").fill_null(0) == 0)
    lines = []
    for knob in knobs:
        values = values_in_order(knob, plan.settings[knob.name])
        if len(values) < 2:
            continue
        low, high = values[0], values[-1]
        judge = _limit_line if knob.name in LENGTHS else _same_line
        others = [name for name in plan.knobs if name != knob.name]
        pairs = rows.filter(pl.col(knob.name) == low).join(
            rows.filter(pl.col(knob.name) == high), on=["sample", *others], suffix=" high"
        )
        parts = pairs.partition_by("model", maintain_order=True) if "model" in others else [pairs]
        judged = [(part, line) for part in parts if (line := judge(knob.name, low, high, part))]
        if judged and len(judged) == len(parts):
            lines.append(judge(knob.name, low, high, pairs))
        else:
            lines += [f"{line} (with model={part['model'][0]})" for part, line in judged]
    return [line for line in lines if line]


def _same_line(knob: str, low: object, high: object, pairs: pl.DataFrame) -> str:
    """Return a line if pairs of answers differ in nothing; else ""."""
    for name in ("text", "output_tokens", EXTRA + "tokens_in", EXTRA + "usd"):
        if name in pairs.columns and not pairs[name].eq_missing(pairs[f"{name} high"]).all():
            return ""
    slower = (pairs["total_ms high"].clip(1e-6) / pairs["total_ms"].clip(1e-6)).log()
    if pairs["sample"].n_unique() < LEAST_SAMPLES or _differs(slower):
        return ""
    reason = "the server may ignore it, or it changes nothing here"
    if knob == "model":
        reason = "the server may answer with one model under both names"
    count = len(pairs)
    return (
        f"{knob}: {count} of {count} answers with {low} are those with {high}, to the letter; "
        f"{reason}"
    )


def _differs(logs: pl.Series) -> bool:
    """Return True if the mean of logarithms of ratios is certainly not 0, and not small."""
    mean = abs(float(logs.mean()))  # type: ignore[arg-type]
    error = float(logs.std() or 0.0) / math.sqrt(len(logs))  # type: ignore[arg-type]
    return mean > math.log1p(SAME_TIME) and mean > 2 * error


def _limit_line(knob: str, low: object, high: object, pairs: pl.DataFrame) -> str:
    """Return a line if most answers are longer than the lower limit; else ""."""
    limit = float(str(low))
    tokens = pairs["output_tokens"]
    longer = tokens.filter(tokens > max(LONGER * limit, limit + 2))
    if pairs["sample"].n_unique() < LEAST_SAMPLES or 2 * len(longer) <= len(pairs):
        return ""
    return (
        f"{knob}: {len(longer)} of {len(pairs)} answers with {low} have more tokens, up to "
        f"{max(longer)}; the server may ignore it, or not bound thoughts by it"
    )


def changes(log: pl.DataFrame) -> list[str]:
    """Return a line on what changes of the model cost, as it was measured before, or as the first
    tokens right after a change show it; none if they cost nothing. With several requests at once
    nothing shows it."""
    if EXTRA + CHANGE_MS in log.columns:
        measured = log.drop_nulls(EXTRA + CHANGE_MS).group_by("model", maintain_order=True)
        costs_ms = dict(measured.agg(pl.median(EXTRA + CHANGE_MS)).iter_rows())
        return [
            f"model: a change takes longer by {say_costs(costs_ms)}, as where a server loads the "
            "model; the times have none of it, since models were measured one after the other, but "
            "requests to models in turn will take so much longer"
        ]
    if EXTRA + CHANGED not in log.columns:
        return []
    key = ["model", EXTRA + CHANGED]
    medians = {
        (model, changed): (ms, count)
        for model, changed, ms, count in log.group_by(key)
        .agg(pl.median("prefill_ms"), pl.len())
        .iter_rows()
    }
    costs_ms = {}
    for model in log["model"].unique(maintain_order=True):
        changed_ms, count = medians.get((model, 1.0), (0.0, 0))
        kept_ms, others = medians.get((model, 0.0), (0.0, 0))
        if min(count, others) >= LEAST_SAMPLES and costs_something(changed_ms, kept_ms):
            costs_ms[model] = changed_ms - kept_ms
    if not costs_ms:
        return []
    return [
        f"model: a change takes longer by {say_costs(costs_ms)}, as where a server loads it, and "
        "that is in the times of answers right after one; measure into another folder with "
        "knobs.warm_up=1, which takes models one after the other"
    ]


def cached_prompts(plan: MeasurementPlan, log: pl.DataFrame) -> list[str]:
    """Return a line on the input tokens that came from the server's cache because each prompt is
    sent several times; none if they are few.

    What a model reads of a sample for the first time may be cached too: a beginning that all
    prompts share. New requests find it there as well, so its share is taken off.
    """
    names = [EXTRA + "tokens_in", EXTRA + "tokens_cached"]
    if not {*names} <= {*log.columns}:
        return []
    # in the order of the log, which a join need not keep
    line = EXTRA + "line"
    rows = plan.select(log.with_row_index(line)).sort(line).drop_nulls(names)
    rows = rows.filter(pl.col(names[0]) > 0)
    first = rows.unique(["sample", "model"], keep="first", maintain_order=True)
    if len(first) == len(rows):
        return []
    shared = float((first[names[1]] / first[names[0]]).median())  # type: ignore[arg-type]
    read, cached = (float(rows[name].sum()) for name in names)
    share = cached / read - shared
    if share <= CACHED:
        return []
    return [
        f"{share:.0%} of the input tokens came from the server's cache, because each prompt is "
        "sent once for each configuration: new requests will take longer, and cost more where "
        "cached tokens are cheaper; switch the cache off at the server, or begin each prompt with "
        "its configuration (messages=module:function), and measure into another folder"
    ]


def cut_prompts(plan: MeasurementPlan, log: pl.DataFrame) -> list[str]:
    """Return a line for each model whose server seems to cut long prompts; see `cut_at`."""
    if EXTRA + "tokens_in" not in log.columns:
        return []
    rows = plan.select(log).drop_nulls(EXTRA + "tokens_in")
    letters = [len(item.question) for item in plan.items]
    by_model = rows.partition_by("model", maintain_order=True) if "model" in plan.knobs else [rows]
    lines = []
    for part in by_model:
        tokens = part[EXTRA + "tokens_in"].to_list()
        if most := cut_at([letters[sample] for sample in part["sample"]], tokens):
            where = f" (with model={part['model'][0]})" if "model" in plan.knobs else ""
            lines.append(cut_line(most) + where)
    return lines


def thoughts(plan: MeasurementPlan, log: pl.DataFrame) -> list[str]:
    """Return a line on answers whose text holds the model's thoughts; none if none does."""
    texts = plan.select(log)["text"].to_list()
    count = sum(map(holds_thoughts, texts))
    if not count:
        return []
    ended = sum(END_OF_THOUGHT in text for text in texts)
    never = f"; {count - ended} of them never end, so these have no answer" * (ended < count)
    return [
        f"{count} of {len(texts)} answers begin with thoughts ({THOUGHT}), and only what follows "
        f"these was scored{never}"
    ]


def uncounted(plan: MeasurementPlan, log: pl.DataFrame) -> list[str]:
    """Return a line on answers whose tokens the server did not count; none if it counted all."""
    rows = plan.select(log)
    for name in ("failed", "tokens_in"):
        if EXTRA + name not in rows.columns:
            rows = rows.with_columns(pl.lit(None, pl.Float64).alias(EXTRA + name))
    # of what was given up nobody expects it
    rows = rows.filter(pl.col(EXTRA + "failed").fill_null(0) == 0)
    count = rows[EXTRA + "tokens_in"].null_count()
    if not count:
        return []
    return [
        f"the server did not count the tokens of {count} of {len(rows)} answers (usage), so that "
        "tokens_in and tokens_out are missing there"
    ]
