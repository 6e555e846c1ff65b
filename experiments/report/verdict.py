"""`results.json` of a run: reading it, and saying in plain words what it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from knobwise.common.errors import InputError
from knobwise.experiments.report.page import quantity

Row = Mapping[str, Any]

LEARNED, STATIC, MIX, ORACLE = "controller", "budget_aware_static", "static_mix", "oracle"
WORDS = {
    "controller": ("learned controller", "the policy that this run trained"),
    "budget_aware_static": (
        "budget-aware static",
        "per budget the one configuration with the best mean utility on the training samples; the same for every input",
    ),
    "static_per_dataset": (
        "static of its data set",
        "budget-aware static fitted on each data set for itself; it is told which one a request is from",
    ),
    "best_static": ("best static", "one configuration for all inputs and all budgets"),
    "lookup_table": (
        "lookup table",
        "per budget the configuration with the best average accuracy among those whose mean latency fits",
    ),
    "latency_only": ("latency only", "predicts latency from the input, and takes accuracy from the averages"),
    "knn": ("nearest neighbours", "predicts accuracy and latency from the most similar training inputs"),
    "ridge": ("ridge regression", "predicts accuracy and latency linearly"),
    "kernel_ridge": ("kernel ridge", "predicts accuracy and latency from how near an input is to every training input"),
    "random_forest": ("random forest", "predicts accuracy and latency with a forest of trees"),
    "gradient_boosting": (
        "gradient boosting",
        "predicts accuracy and latency with small trees, each for what those before it left",
    ),
    "random": ("random", "any profiled configuration, each as likely"),
    "oracle": (
        "oracle (upper bound)",
        "knows what was measured for this input, as nothing real does",
    ),
}
WORTH_EXPORTING = 0.05
"""Share of the mean latency above which a decision is too slow."""
TERMS = {
    "utility": "the accuracy of an answer that met its budget, 0 for one that did not; what policies are judged on",
    "gap closed": "(policy − budget-aware static) / (oracle − budget-aware static), in utility; 100% is the oracle",
    "in time": "share of requests that met their budget",
    "where possible": "the same among requests that at least one profiled configuration could serve in time",
    "infeasible": "share of requests that no profiled configuration could serve in time; every policy is late for them",
    "interval": "95% bootstrap interval over the test samples, in brackets",
    "decision": "median time that choosing takes, for one request",
}


def read_results(run_folder: str | Path) -> dict[str, Any]:
    """`results.json` of a run's folder.

    Raises:
        InputError: not there, or not the results of a run.
    """
    path = Path(run_folder) / "results.json"
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is this the folder of a finished run?") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # bytes that are no text, text that is no JSON
        raise InputError(f"{path}: not the results of a run ({error})") from error
    rows = results.get("rows") if isinstance(results, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "policy" in row for row in rows):
        raise InputError(f"{path}: not the results of a run: `rows`, one for each policy and budget, is missing")
    if not rows:
        raise InputError(f"{path}: has no rows; was the run judged?")
    return results


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the run showed, in plain lines: against static, against baselines, in keeping time; training, the guard."""
    means = means_of(results)
    learned = means.get(LEARNED)
    if learned is None:
        best = max((row for name, row in means.items() if name != ORACLE), key=utility_of, default=None)
        return ["No learned policy was judged." + (f" Best: {_with_utility(best)}." if best else "")]
    sentences = [_against_static(learned, means)]
    rivals = sorted((r for n, r in means.items() if n not in (LEARNED, STATIC, ORACLE)), key=utility_of, reverse=True)
    better = [row for row in rivals if utility_of(row) > utility_of(learned)]
    if better:
        listed = "; ".join(f"{_with_utility(row)}, {_apart(row, learned)}" for row in better)
        sentences.append(f"{len(better)} of {len(rivals)} other baselines did better than the controller: {listed}.")
    elif rivals:
        next_best = f"{_with_utility(rivals[0])}, {_apart(rivals[0], learned)}"
        sentences.append(f"None of the {len(rivals)} other baselines did better; the strongest is {next_best}.")
    if known(learned.get("satisfaction_feasible")):
        kept, level = float(learned["satisfaction_feasible"]), results.get("satisfaction_level")
        sentence = f"Where the budget could be met at all, the controller met it in {kept:.1%} of the requests"
        if level is not None:
            sentence += f"; that {'meets' if kept >= level else 'falls short of'} the {level:.0%} asked for"
        if (learned.get("infeasible") or 0) > 0:
            sentence += f" ({learned['infeasible']:.1%} of all could not be met)"
        sentences.append(f"{sentence}.")
    return sentences + on_training(results) + _on_the_guard(guarantees(results), unit_of(results))


def grpo_begins(results: Mapping[str, Any]) -> int | None:
    """The iteration at which GRPO begins; None where training had no warm-up or no GRPO, or where it is not known."""
    training = results.get("training") or {}
    return training.get("warmup_iterations") or None if training.get("iterations") else None


def kept_before_grpo(results: Mapping[str, Any]) -> int:
    """In how many seeds GRPO changed nothing, as validation chose the network from before it."""
    begins = grpo_begins(results)
    return (
        0 if begins is None else sum(one.get("iteration", begins + 1) <= begins for one in results.get("chosen") or ())
    )


def on_training(results: Mapping[str, Any]) -> list[str]:
    """Whether GRPO had a part in what was judged, in a sentence; [] where it had in every seed."""
    early, seeds = kept_before_grpo(results), len(results.get("chosen") or ())
    where = "" if seeds == 1 else f" in {early} of {seeds} seeds"
    return [f"The network that validation chose is from before GRPO{where}: GRPO added nothing there."] if early else []


def on_decisions(results: Mapping[str, Any]) -> str:
    """What deciding takes beside what is decided on, in a sentence; features and setting knobs only a live run knows.
    Empty where it is not known, or the budget limits no time."""
    learned = means_of(results).get(LEARNED, {})
    micros, mean = (float(learned.get(key) or 0) for key in ("decision_us_p50", "latency_ms_mean"))
    if unit_of(results) != "ms" or not micros > 0 or not mean > 0:
        return ""
    share = micros / 1e3 / mean
    said = f"A decision takes {quantity(micros, 'µs')}, {share:.1%} of the mean latency"
    if share > WORTH_EXPORTING:
        said += "; exported it takes less, and a student of it least (knobwise export student=true)"
    return f"{said}."


def _against_static(learned: Row, means: Mapping[str, Row]) -> str:
    static, gap, ends = means.get(STATIC), learned.get("gap_closed"), learned.get("gap_closed_ci95")
    if static is None:
        return (
            f"The learned controller reached a mean utility of {utility_of(learned):.3f}; no static policy was judged."
        )
    numbers = f"mean utility {utility_of(learned):.3f} against {utility_of(static):.3f}"
    if not known(gap) or not ends or not all(map(known, ends)):
        return f"Against budget-aware static the learned controller has {numbers}; no interval is known."
    span = f"95% interval {ends[0]:z.0%} to {ends[1]:z.0%}"
    if ends[0] > 0:
        closes = f"It closes {gap:z.0%} of the gap to the oracle ({span})"
        return f"The learned controller beats budget-aware static: {numbers}. {closes}."
    gap_words = f"gap to the oracle closed: {gap:z.0%} ({span})"
    if ends[1] < 0:
        return f"The learned controller is worse than budget-aware static: {numbers}; {gap_words}."
    return f"It is not shown that the learned controller beats budget-aware static: {numbers}; {gap_words}."


def _on_the_guard(budgets: Sequence[Sequence[Row]], unit: str) -> list[str]:
    """Where it fell back, and where it does not keep the level."""

    def where(test: Callable[[Row], bool], says: Callable[[Sequence[Row]], str]) -> str:
        found = [(rows, [row for row in rows if test(row)]) for rows in budgets]
        return ", ".join(
            f"{quantity(rows[0]['budget_ms'], unit)}{says(those)}"
            + (f" ({len(those)} of {len(rows)} seeds)" if len(those) < len(rows) else "")
            for rows, those in found
            if those
        )

    def kept(name: str) -> Callable[[Sequence[Row]], str]:
        return lambda rows: f" (kept: {mean_of(rows, name):.1%})"

    def nothing(rows: Sequence[Row]) -> str:
        return ""

    sentences = []
    if worse := where(lambda row: not row["deployed"] and not row["better"], nothing):
        every = all(not row["deployed"] and not row["better"] for rows in budgets for row in rows)
        places = "every budget" if every else worse
        why = "on held-out samples the policy was not shown to be better"
        sentences.append(f"The guard fell back to budget-aware static at {places}: {why}.")
    if safer := where(lambda row: not row["deployed"] and row["better"], nothing):
        sentences.append(f"The guard fell back to budget-aware static at {safer}: only static keeps the level.")
    level = f"{100 * budgets[0][0]['level']:g}% in time" if budgets else ""
    if out_of_reach := where(lambda row: row["unattainable"], kept("satisfaction_deployed")):
        sentences.append(f"{level} is unattainable at {out_of_reach}; nothing is forced there.")
    if too_dear := where(lambda row: row["too_dear"], kept("satisfaction_deployed")):
        sentences.append(f"{level} is too dear at {too_dear}; nothing is forced there.")
    return sentences


def _apart(row: Row, learned: Row) -> str:
    """How a baseline differs from the learned policy. Each interval is that policy's own: "apart" is certain."""
    difference = utility_of(row) - utility_of(learned)
    words = f"{abs(difference):.3f} {'higher' if difference > 0 else 'lower'}"
    one, other = row.get("utility_ci95"), learned.get("utility_ci95")
    if not one or not other:
        return words
    return f"{words}, intervals {'overlap' if one[0] <= other[1] and other[0] <= one[1] else 'apart'}"


def _with_utility(row: Row) -> str:
    return f"{policy_name(row['policy'])} ({utility_of(row):.3f})"


# -- the rows and their numbers ----------------------------------------------------------------------------------------


def policy_name(policy: str) -> str:
    """A policy in plain words."""
    return WORDS[policy][0] if policy in WORDS else policy.replace("_", " ")


def means_of(results: Mapping[str, Any]) -> dict[str, Row]:
    return {row["policy"]: row for row in results["rows"] if row.get("budget_ms") is None}


def ranked(results: Mapping[str, Any]) -> list[Row]:
    return sorted(means_of(results).values(), key=utility_of, reverse=True)


def budgets_of(results: Mapping[str, Any]) -> list[float]:
    return sorted({row["budget_ms"] for row in results["rows"] if row.get("budget_ms") is not None})


def guarantees(results: Mapping[str, Any]) -> list[list[Row]]:
    """What the guard found at each budget: one row a seed. [] without a guard."""
    at = {rows[0]["budget_ms"]: list(rows) for rows in zip(*(results.get("guard") or []), strict=True)}
    return list(at.values())


def mean_of(rows: Sequence[Row], name: str) -> float:
    """The mean of what is known; NaN where nothing is."""
    values = [row[name] for row in rows if known(row.get(name))]
    return sum(values) / len(values) if values else math.nan


def unit_of(results: Mapping[str, Any]) -> str:
    """What latencies and budgets are in: ms, or the unit of the cost that stands for latency."""
    return str(results.get("unit", "ms"))


def known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def utility_of(row: Row) -> float:
    return float(row["utility"]) if known(row.get("utility")) else -math.inf


def number(value: Any, how: str, unit: str = "") -> str:
    return f"{value:z{how}}{unit}" if known(value) else "–"


def interval(ends: Any, how: str) -> str:
    """The small print under a number; nothing where the interval is a point, as for static and oracle in gap closed."""
    return f"\n[{ends[0]:z{how}}, {ends[1]:z{how}}]" if ends and all(map(known, ends)) and ends[0] < ends[1] else ""
