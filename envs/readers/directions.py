"""Which way is better: accuracies must rise with quality, and costs must fall with speed."""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError
from knobwise.envs.readers.outcome_columns import plain_name

ERRORS = re.compile(
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


def counts_errors(name: str) -> bool:
    """Return whether the name of a measure says that lower is better."""
    words = plain_name(name)
    return bool(ERRORS.fullmatch(words)) and not TURNED.fullmatch(words)


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
