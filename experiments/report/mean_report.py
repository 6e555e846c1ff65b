"""What a run under mean budgets found, in words, tables and charts: what `report` and the terminal show of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.experiments.report import charts, page
from knobwise.experiments.report.verdict import (
    LEARNED,
    MIX,
    ORACLE,
    Row,
    budgets_of,
    interval,
    known,
    number,
    on_training,
    policy_name,
    unit_of,
)
from knobwise.experiments.results import by_dataset

if TYPE_CHECKING:
    import altair as alt

SINGLE = "best_single"
REFERENCES = (MIX, SINGLE, ORACLE)
TERMS = {
    "mean budget": "the average latency over all requests may be this much; easy requests pay for hard ones",
    "static mix": "the best random mixture of two configurations, the same for every input",
    "best single": "the one configuration with the best accuracy on the training samples among those whose mean "
    "latency fits",
    "oracle": "the most that any choice among the measured configurations could have got, in hindsight",
    "over static mix, over best single": "difference in accuracy to that way of choosing at equal mean latency: at "
    "what the policy really spent on the test samples, which is not exactly its budget",
    "gap closed": "(policy − static mix) / (oracle − static mix), in accuracy, all at equal mean latency",
    "price": "λ: how much accuracy a unit of latency must bring. A policy takes argmax Â − λ·L̂; 1/λ is what a right "
    "answer is worth",
    "brackets": "95% bootstrap interval over the test samples and seeds, paired where it is of a difference",
}


def verdict(results: Mapping[str, Any]) -> list[str]:
    """What the run showed, in plain sentences: at the tightest budgets, over all of them, the guard."""
    at, budgets, means = _by_budget(results), budgets_of(results), _means(results)
    learned = means.get(LEARNED)
    if learned is None:
        return ["No learned policy was judged."]
    tight = [at[LEARNED, budget] for budget in budgets[:2]]
    points = " and ".join(_points(row["over_best_single"]) for row in tight)
    best = " and ".join(_points(row["oracle_accuracy"] - row["accuracy"] + row["over_best_single"]) for row in tight)
    spent = " and ".join(page.quantity(row["latency_ms_mean"], unit_of(results)) for row in tight)
    which = "two tightest mean budgets" if len(tight) > 1 else "mean budget"
    sentences = [
        f"At the {which} the controller has {points} points of accuracy over the best single configuration of equal "
        f"mean latency ({spent}); the oracle has {best}."
    ]
    low, high = learned["over_static_mix_ci95"]
    numbers = (
        f"{_points(learned['over_static_mix'])} points of accuracy (95% interval {_points(low)} to {_points(high)}) "
        f"against the static mix of equal mean latency, mean over {len(budgets)} mean budgets"
    )
    closed = f"gap to the oracle closed: {number(learned['gap_closed'], '.0%')}"
    shown = "beats" if low > 0 else "is worse than" if high < 0 else "is not shown to beat"
    sentences.append(f"The learned controller {shown} the static mix: {numbers}; {closed}.")
    rivals = [row for name, row in means.items() if name not in (LEARNED, *REFERENCES)]
    if rivals:
        better = [row for row in rivals if row["over_static_mix"] > learned["over_static_mix"]]
        best_rival = max(rivals, key=lambda row: float(row["over_static_mix"]))
        words = f"{policy_name(best_rival['policy'])} ({_points(best_rival['over_static_mix'])} points)"
        how_many = f"{len(better)} of {len(rivals)}" if better else f"None of the {len(rivals)}"
        sentences.append(f"{how_many} other ways of looking at the input did better; the strongest is {words}.")
    sentences += on_training(results)
    guards = results.get("guard") or []
    back = sum(not row["deployed"] for rows in guards for row in rows)
    if back:
        sentences.append(
            f"In {back} of {sum(map(len, guards))} cases (seeds × budgets) the guard fell back to the static mix."
        )
    return sentences


# -- tables ------------------------------------------------------------------------------------------------------------

HEADER = ["policy", "accuracy", "mean latency", "over static mix", "over best single", "gap closed", "decision"]


def cells_of_means(results: Mapping[str, Any]) -> list[list[str]]:
    """The means over the budgets, best first, under `HEADER`."""
    ranked = sorted(_means(results).values(), key=lambda row: -float(row["over_static_mix"]))
    return [_cells(row, unit_of(results)) for row in ranked]


def _cells(row: Row, unit: str) -> list[str]:
    return [
        policy_name(row["policy"]),
        number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f"),
        page.quantity(row.get("latency_ms_mean"), unit),
        _signed(row["over_static_mix"]) + interval(row.get("over_static_mix_ci95"), ".3f"),
        _signed(row["over_best_single"]) + interval(row.get("over_best_single_ci95"), ".3f"),
        number(row.get("gap_closed"), ".0%") + interval(row.get("gap_closed_ci95"), ".0%"),
        page.quantity(row.get("decision_us_p50"), "µs"),
    ]


def sections(results: Mapping[str, Any]) -> list[str]:
    """The parts of the report between the verdict and the choices."""
    unit, budgets, at = unit_of(results), budgets_of(results), _by_budget(results)
    cells = cells_of_means(results)
    strong = [i for i, row in enumerate(cells) if row[0] == policy_name(LEARNED)]
    terms = "".join(f"<dt>{name}</dt><dd>{words}</dd>" for name, words in TERMS.items())
    parts = [
        "<h2>Results</h2><p>Means over the mean budgets; the best policies come first.</p>",
        page.table(HEADER, cells, strong),
        page.folded("What the words mean", f"<dl>{terms}</dl>"),
        "<h2>Per mean budget</h2><p>Accuracy, with its interval; below it the mean latency that was really spent, the "
        "difference to the static mix of equal mean latency, and the price.</p>",
        page.table(
            ["policy", *(page.quantity(budget, unit) for budget in budgets)],
            [[name, *(_cell(at[policy, b], unit) for b in budgets)] for policy, name in _names(results).items()],
            [i for i, policy in enumerate(_names(results)) if policy == LEARNED],
        ),
        *by_dataset.sections(results),
        *_guarantees(results),
    ]
    for name, (caption, chart) in result_charts(results).items():
        parts += [f"<h2>{name}</h2>", page.figure(chart, caption)]
    return parts


def _cell(row: Row, unit: str) -> str:
    price = f"λ = {row['price']:.3g} per {unit}" if known(row.get("price")) else ""
    over = _signed(row["over_static_mix"]) + " over mix"
    first = number(row.get("accuracy"), ".3f") + interval(row.get("accuracy_ci95"), ".3f")
    return "\n".join(filter(None, [first, f"{page.quantity(row.get('latency_ms_mean'), unit)} · {over}", price]))


def _guarantees(results: Mapping[str, Any]) -> list[str]:
    """The guard, budget by budget; one line a seed."""
    guards: Sequence[Sequence[Row]] = results.get("guard") or []
    if not guards:
        return []
    rows = [
        [page.quantity(of_seeds[0]["budget_ms"], unit_of(results)), "\n".join(str(row["reason"]) for row in of_seeds)]
        for of_seeds in zip(*guards, strict=True)
    ]
    words = "<p>What the guard found on held-out samples; one line a seed.</p>"
    return ["<h2>Guard</h2>", words, page.table(["mean budget", "decision"], rows, words=[1])]


# -- charts ------------------------------------------------------------------------------------------------------------


def result_charts(results: Mapping[str, Any]) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """The charts that the results have numbers for: heading → (caption, chart)."""
    means, unit = _means(results), unit_of(results)
    others = [name for name in means if name not in (LEARNED, *REFERENCES)]
    others.sort(key=lambda name: -float(means[name]["over_static_mix"]))
    named = {name: policy_name(name) for name in (LEARNED, MIX, *others[:1], ORACLE) if name in means}
    points = [
        {"policy": named.get(row["policy"], charts.OTHER), "name": policy_name(row["policy"])}
        | {"budget_ms": float(row["budget_ms"]), "accuracy": row["accuracy"], "latency_ms": row["latency_ms_mean"]}
        | {
            "over": row["over_static_mix"],
            "low": row["over_static_mix_ci95"][0],
            "high": row["over_static_mix_ci95"][1],
        }
        for row in results["rows"]
        if row["budget_ms"] is not None
    ]
    frame = pl.DataFrame(points)
    drawn: dict[str, tuple[str, alt.TopLevelMixin]] = {}
    strongest = f" The strongest other policy is {policy_name(others[0])}." if others else ""
    if results.get("configurations"):
        dots = pl.DataFrame([{k: c[k] for k in ("label", "accuracy", "latency_ms")} for c in results["configurations"]])
        own = frame.filter(~pl.col("policy").is_in([charts.OTHER, policy_name(MIX)]))
        hull = [
            {"policy": policy_name(MIX), "budget_ms": c["latency_ms"], "accuracy": c["accuracy"]}
            | {"latency_ms": c["latency_ms"]}
            for c in results["static_hull"]
        ]
        paths = pl.concat([own.select("policy", "budget_ms", "accuracy", "latency_ms"), pl.DataFrame(hull)])
        drawn["Accuracy against the mean latency really spent"] = (
            "Each grey dot is one configuration used for every test input, the line of the static mix joins those it "
            "mixes. A point of a policy is what it reached at one mean budget: how far it stands above that line is "
            "what looking at the input brings at equal mean latency." + strongest,
            charts.plane(dots, paths, list(named.values()), unit=unit),
        )
    order = [*named.values(), *([charts.OTHER] if len(others) > 1 else [])]
    over = frame.filter(~pl.col("name").is_in([policy_name(ORACLE), policy_name(SINGLE), policy_name(MIX)]))
    if len(over):
        drawn["Accuracy over the static mix of equal mean latency"] = (
            "Difference in accuracy, by mean budget; shaded: 95% intervals." + strongest,
            charts.by_budget(over, "over", "accuracy over the static mix", order, level=0.0, unit=unit),
        )
    return drawn


# -- the rows ----------------------------------------------------------------------------------------------------------


def _means(results: Mapping[str, Any]) -> dict[str, Row]:
    return {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}


def _by_budget(results: Mapping[str, Any]) -> dict[tuple[str, float], Row]:
    return {(row["policy"], row["budget_ms"]): row for row in results["rows"] if row["budget_ms"] is not None}


def _names(results: Mapping[str, Any]) -> dict[str, str]:
    return {policy: policy_name(policy) for policy in _means(results)}


def _signed(difference: float) -> str:
    return f"{difference:+z.3f}"


def _points(share: float) -> str:
    return f"{100 * share:+z.1f}"
