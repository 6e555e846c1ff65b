"""The page of `knobwise compare`: what differs between runs, in words, tables and charts, in one file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from knobwise.experiments import charts, page
from knobwise.experiments.compare import Comparison
from knobwise.experiments.compare_words import (
    SIDE_BY_SIDE,
    SPOKEN_OF,
    cells,
    difference_words,
    header,
    method,
    p_words,
    settings_cells,
    shown_words,
    verdict,
)
from knobwise.experiments.compared_runs import ComparedRun
from knobwise.experiments.paired import Difference
from knobwise.experiments.selector_results import CONTROLS
from knobwise.experiments.selector_verdict import policy_words, shots_words
from knobwise.experiments.training_curves import logged_numbers
from knobwise.experiments.verdict import MIX, ORACLE, STATIC, interval, number, policy_name

if TYPE_CHECKING:
    import altair as alt

COLOURED = 4
"""So many runs have a colour of their own: the first, and those with the best scores."""
CURVES = {
    "Utility": "utility (0 to 1)",
    "Reward_Mean": "reward, mean",
    "Accuracy_Mean": "accuracy, mean (0 to 1)",
    "Latency_Mean": "latency, mean ({unit})",
    "Budget_Violation_Rate": "over budget (share)",
}
"""What is drawn of training, in this order; the reward only where there is no utility: runs may differ in it."""
POINTS = 400
"""At most so many points has a curve."""


def write_comparison(comparison: Comparison, path: str | Path) -> Path:
    """Write the page and return its path."""
    runs = comparison.runs
    names = " · ".join(run.label for run in runs) if len(runs) <= SIDE_BY_SIDE else f"{len(runs)} runs"
    experiments = list(dict.fromkeys(run.experiment for run in runs))
    title = f"{', '.join(experiments)}: {names}" if len(experiments) == 1 else names
    says = "".join(f"<p>{html.escape(words)}</p>" for words in verdict(comparison))
    parts = [
        f"<p class=soft>knobwise comparison</p><h1>{html.escape(title)}</h1>",
        f"<p class=soft>{html.escape(' · '.join(_facts(comparison)))}</p>",
        f"<div class=verdict>{says}</div>",
        *(f"<p>{html.escape(note)}</p>" for note in comparison.notes),
        *_settings(comparison),
        *_results(comparison),
    ]
    for name, (caption, chart) in comparison_charts(comparison).items():
        parts += [f"<h2>{name}</h2>", page.figure(chart, caption)]
    entries = "".join(
        f"<dt>{html.escape(run.label)}</dt><dd>{html.escape(str(run.folder))}<br>"
        f"<code>{html.escape(str(run.results.get('command', '')))}</code></dd>"
        for run in runs
    )
    parts.append(page.folded("The runs: folders and commands", f"<dl>{entries}</dl>"))
    return page.write_page(path, f"knobwise: {title}", parts)


def _facts(comparison: Comparison) -> list[str]:
    results = comparison.runs[0].results
    profile = results.get("profile", {})
    if comparison.kind == "selector":
        judged = f"judged on {results['test_queries']:,} held-out queries"
    else:
        judged = f"judged on {results.get('test_samples', '?')} test samples"
        judged += f" at {', '.join(page.quantity(budget, comparison.unit) for budget in comparison.places)}"
    return [f"held against {comparison.runs[0].label}", f"profile {profile.get('name', 'unnamed')}", judged]


# -- tables ------------------------------------------------------------------------------------------------------------


def _settings(comparison: Comparison) -> list[str]:
    parts = ["<h2>What differs in the settings</h2>"]
    if not comparison.settings:
        return [*parts, "<p>Nothing.</p>"]
    head, lines = settings_cells(comparison)
    return [*parts, page.table(head, [list(map(_broken, line)) for line in lines])]


def _broken(value: str) -> str:
    """A long list in several lines."""
    if len(value) <= 40:
        return value
    words, lines = value.split(","), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 40:
            lines.append("")
        lines[-1] += word + ","
    return "\n".join(lines).rstrip(",")


def _results(comparison: Comparison) -> list[str]:
    parts = ["<h2>Results</h2>"]
    if comparison.kind == "selector":
        parts.append("<p>Share of held-out queries answered right, of the policy that was trained furthest.</p>")
    elif comparison.kind == "mean":
        parts.append("<p>Means over the mean budgets; differences to the static mix are at equal mean latency.</p>")
    else:
        parts.append("<p>Means over the budgets. Utility is the accuracy of an answer in time, 0 for a late one.</p>")
    parts.append(page.table(*_narrow(comparison), [0]))
    if words := method(comparison):
        parts.append(f"<p class=soft>{html.escape(words)}</p>")
    if comparison.found:
        caption = "A dot is the difference to the first run, the line its 95% interval; grey: it may be chance."
        parts.append(page.figure(charts.differences(_differences(comparison), _axis(comparison)), caption))
    if comparison.kind != "selector":
        per_budget = "<p>Utility" if comparison.kind == "deadline" else "<p>Accuracy"
        per_budget += " with its interval; below it the difference to the first run, p, and its interval; * where "
        per_budget += "the interval excludes 0 and p is small enough."
        per_budget += _family(comparison.in_detail) + "</p>"
        table = page.table(*_per_budget(comparison), [0])
        if len(comparison.runs) <= SPOKEN_OF:
            parts += ["<h2>Per budget</h2>", per_budget, table]
        else:
            parts.append(page.folded("Per budget", per_budget + table))
    elif comparison.in_detail and len(comparison.places) > 1:
        words = f"<p>Differences to the first run, in points, and p.{_family(comparison.in_detail)}</p>"
        parts += ["<h2>By number of demonstrations</h2>", words, _per_shots(comparison)]
    if comparison.of_policies:
        words = f"<p>The same of every policy that both runs trained, at {shots_words(int(comparison.main or 0))}."
        parts += ["<h2>Stage by stage</h2>", f"{words}{_family(comparison.of_policies)}</p>", _per_policy(comparison)]
    return parts


def _narrow(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table of the terminal, with difference, p and what they show in one cell."""
    head, lines = header(comparison), cells(comparison)
    place = head.index("p") - 1
    for line in lines:
        gap, p, shown = line[place : place + 3]
        line[place : place + 3] = [f"{gap}\n{shown}, p {p}" if p != "–" else shown or "–"]
    return [*head[: place + 1], *head[place + 3 :]], lines


def _family(family: Sequence[Difference]) -> str:
    return f" p is corrected for the {len(family)} comparisons of this table." if len(family) > 1 else ""


def _axis(comparison: Comparison) -> str:
    what = {
        "deadline": "difference in mean utility",
        "mean": "difference in accuracy at equal mean latency",
        "selector": "difference in accuracy",
    }[comparison.kind]
    return f"{what} to the first run"


def _differences(comparison: Comparison) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {"run": one.run, "difference": one.difference, "low": one.ci95[0], "high": one.ci95[1]}
            | {"shown": shown_words(one)}
            for one in comparison.found
        ]
    )


def _with_difference(first: str, one: Difference | None, kind: str) -> str:
    if one is None:
        return first
    gap, span = difference_words(one, kind)
    mark = " *" if one.sign else ""
    return f"{first}\n{gap}{mark}, p {p_words(one.p_holm)}\n{span}"


def _per_budget(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    at = {(one.run, one.place): one for one in comparison.in_detail}
    column = "utility" if comparison.kind == "deadline" else "accuracy"
    lines = []
    for run, policy in zip(comparison.runs, comparison.policies, strict=True):
        row = [run.row(policy, place) for place in comparison.places]
        own = [number(r.get(column), ".3f") + interval(r.get(f"{column}_ci95"), ".3f") for r in row]
        found = [at.get((run.label, place)) for place in comparison.places]
        both = zip(own, found, strict=True)
        lines.append([run.label, *(_with_difference(first, one, comparison.kind) for first, one in both)])
    return ["run", *(page.quantity(place, comparison.unit) for place in comparison.places)], lines


def _per_shots(comparison: Comparison) -> str:
    at = {(one.run, one.place): one for one in comparison.in_detail}
    lines = []
    for run in comparison.runs[1:]:
        found = [at.get((run.label, place)) for place in comparison.places]
        lines.append([run.label, *(_points(one) for one in found)])
    return page.table(["run", *(shots_words(int(place)) for place in comparison.places)], lines)


def _points(one: Difference | None) -> str:
    if one is None:
        return "–"
    gap, span = difference_words(one, "selector")
    return f"{gap}{' *' if one.sign else ''}\n{span}\np {p_words(one.p_holm)}"


def _per_policy(comparison: Comparison) -> str:
    lines = []
    for one in comparison.of_policies:
        run = next(run for run in comparison.runs if run.label == one.run)
        reference = comparison.runs[0]
        before, after = (r.row(one.policy, one.place).get("accuracy") for r in (reference, run))
        gap = "\n".join(difference_words(one, "selector"))
        row = [policy_words(one.policy, run.results), number(before, ".3f"), number(after, ".3f"), gap]
        lines.append([one.run, *row, p_words(one.p_holm), shown_words(one)])
    head = ["run", "policy", comparison.runs[0].label, "this run", "difference, points", "p", "shown"]
    return page.table(head, lines)


# -- charts ------------------------------------------------------------------------------------------------------------


def comparison_charts(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """The charts that the runs have numbers for: heading → (caption, chart)."""
    drawn = _of_selectors(comparison) if comparison.kind == "selector" else _of_controllers(comparison)
    panels, points = _curves(comparison)
    if len(points):
        chart = charts.curves_of_runs(points, panels, order(comparison))
        alone = "" if comparison.kind == "selector" else " They are of the network alone, without experts or guard."
        drawn["Training, on validation samples"] = (
            "Means over the seeds, shaded from the lowest to the highest seed; each curve ends where the first of its "
            f"seeds did.{alone}{_grey(comparison)}",
            chart,
        )
    return drawn


def coloured(comparison: Comparison) -> list[str]:
    """The labels of the runs with a colour of their own, in the order given."""
    if len(comparison.runs) <= COLOURED:
        return [run.label for run in comparison.runs]
    chosen = {0, *[i for i in comparison.best() if i][: COLOURED - 1]}
    return [run.label for i, run in enumerate(comparison.runs) if i in chosen]


def order(comparison: Comparison) -> list[str]:
    """Of the legend."""
    return [*coloured(comparison), *([charts.OTHER] if len(comparison.runs) > COLOURED else [])]


def _colour(comparison: Comparison, run: ComparedRun) -> dict[str, str]:
    return {"policy": run.label if run.label in coloured(comparison) else charts.OTHER, "name": run.label}


def _grey(comparison: Comparison) -> str:
    more = len(comparison.runs) - COLOURED
    return f" In colour: the first run and the {COLOURED - 1} best others; grey: {more} more." if more > 0 else ""


def _of_controllers(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """Under deadlines utility, the plane, keeping budgets, knobs; under mean budgets the plane, and what is over the
    static mix."""
    reference, unit, places = comparison.runs[0], comparison.unit, comparison.places
    static = MIX if comparison.kind == "mean" else STATIC
    paths = _rows(comparison, {run.label: run for run in comparison.runs})
    quiet = pl.DataFrame(
        [
            {"policy": policy_name(policy), "budget_ms": place, "accuracy": row.get("accuracy")}
            | {"latency_ms": row.get("latency_ms_mean"), "utility": row.get("utility")}
            | {"satisfaction": row.get("satisfaction"), "satisfaction_feasible": row.get("satisfaction_feasible")}
            for policy in (static, ORACLE)
            for place in places
            if (row := reference.row(policy, place))
        ],
        infer_schema_length=None,
    )
    seen = quiet if len(quiet) else None
    drawn: dict[str, tuple[str, alt.TopLevelMixin]] = {}
    grey, named = _grey(comparison), order(comparison)
    if configurations := reference.results.get("configurations"):
        dots = pl.DataFrame([{k: c[k] for k in ("label", "accuracy", "latency_ms")} for c in configurations])
        columns = ["policy", "name", "budget_ms", "accuracy", "latency_ms"]
        drawn["Accuracy and latency"] = (
            "A coloured line is what a run reached, one point per budget. Each grey dot is one configuration used for "
            "every test input, the thin dashed line joins those that no other beats. Dots, "
            f"{policy_name(static)} and oracle are those of {reference.label}.{grey}",
            charts.plane(
                dots,
                paths.select(columns),
                named,
                unit,
                None if seen is None else seen.select("policy", "budget_ms", "accuracy", "latency_ms"),
            ),
        )
    if comparison.kind == "mean":
        drawn["Accuracy over the static mix of equal mean latency"] = (
            f"Difference in accuracy, by mean budget; shaded: 95% intervals.{grey}",
            charts.by_budget(paths, "over", "accuracy over the static mix", named, level=0.0, unit=unit),
        )
        return drawn
    bands = paths if len(comparison.runs) <= COLOURED else paths.drop("low", "high")
    drawn["Utility against budget"] = (
        f"Mean accuracy of answers, counted 0 when late.{' Shaded: 95% intervals.' * ('low' in bands.columns)}{grey}",
        charts.by_budget(bands, "utility", "utility (0 to 1)", named, unit=unit, references=seen),
    )
    asked = reference.results.get("satisfaction_level")
    level = None if asked is None else float(asked)
    panels = [("satisfaction", "all requests in time"), ("satisfaction_feasible", "in time, where possible")]
    size, kept = (350, 250), paths.drop("low", "high")
    drawn["Keeping the budget"] = (
        f"Share of requests that met their budget{'' if level is None else f'; dashed: {level:.0%}, as asked for'}."
        f"{grey}",
        charts.side_by_side(
            [charts.by_budget(kept, y, t, named, percent=True, level=level, size=size, unit=unit) for y, t in panels]
        ),
    )
    usage = [
        {"policy": run.label, "budget_ms": row["budget_ms"], "knob": row["knob"]}
        | {"value": str(row["value"]), "share": row["share"]}
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for row in run.results.get("knob_usage", [])
        if row["policy"] == policy and run.label in coloured(comparison)
    ]
    if usage:
        few = f" Of the first run and the {COLOURED - 1} best others." if grey else ""
        frame = pl.DataFrame(usage, infer_schema_length=None).unique(maintain_order=True)
        shown = [label for label in coloured(comparison) if label in set(frame["policy"])]
        drawn["Which settings are used"] = (
            f"Share of the test requests that each value of a knob gets, per budget.{few}",
            charts.knob_usage(frame, shown, unit, 200 if len(shown) <= 3 else 150),
        )
    return drawn


def _rows(comparison: Comparison, runs: dict[str, ComparedRun]) -> pl.DataFrame:
    """The numbers of the learned policy of each run at each budget."""
    rows = []
    for run, policy in zip(runs.values(), comparison.policies, strict=True):
        for place in comparison.places:
            row = run.row(policy, place)
            if not row:
                continue
            spread = "over_static_mix_ci95" if comparison.kind == "mean" else "utility_ci95"
            low, high = row.get(spread) or (None, None)
            rows.append(
                {**_colour(comparison, run), "budget_ms": place, "accuracy": row.get("accuracy")}
                | {"latency_ms": row.get("latency_ms_mean"), "utility": row.get("utility"), "low": low, "high": high}
                | {"over": row.get("over_static_mix"), "satisfaction": row.get("satisfaction")}
                | {"satisfaction_feasible": row.get("satisfaction_feasible")}
            )
    return pl.DataFrame(rows, infer_schema_length=None)


def _of_selectors(comparison: Comparison) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """Accuracy over shots."""
    if len(comparison.places) < 2:
        return {}
    rows = [
        {**_colour(comparison, run), "shots": int(place), "accuracy": row["accuracy"]}
        | dict(zip(("low", "high"), row.get("accuracy_ci95") or (None, None), strict=True))
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
        for place in comparison.places
        if (row := run.row(policy, place))
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    if len(comparison.runs) > COLOURED:
        frame = frame.drop("low", "high")
    words = {
        run.label: policy_words(policy, run.results)
        for run, policy in zip(comparison.runs, comparison.policies, strict=True)
    }
    which = (
        f" All lines are of {next(iter(words.values()))}."
        if len(set(words.values())) == 1
        else f" The lines are of {', '.join(f'{policy} ({label})' for label, policy in words.items())}."
        if len(words) <= SIDE_BY_SIDE
        else ""
    )
    return {
        "Accuracy against shots": (
            f"Share of held-out queries answered right; dashed: {shots_words(int(comparison.main or 0))}, what is "
            f"compared above.{' Shaded: 95% intervals.' * ('low' in frame.columns)}{which}{_grey(comparison)}",
            charts.by_shots(frame, order(comparison), int(comparison.main or 0)),
        )
    }


# -- curves ------------------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> tuple[list[str], pl.DataFrame]:
    """Panels, and for each of them, each run and step the mean, lowest and highest seed."""
    frames, steps = [], pl.col("step").max().over("metric", "seed")
    for run in comparison.runs:
        logged = logged_numbers(run.folder / "metrics.csv")
        if logged is None:
            continue
        logged = logged.filter(pl.col("part") == "validation").with_columns(seed=pl.col("seed").fill_null(""))
        # one that went on longer than the others is no mean over seeds
        logged = logged.filter(pl.col("step") <= steps.min().over("metric"))
        means = logged.group_by("metric", "step").agg(
            pl.col("value").mean().alias("mean"),
            pl.col("value").min().alias("low"),
            pl.col("value").max().alias("high"),
        )
        every = pl.int_range(pl.len()).over("metric", order_by="step") % (pl.len().over("metric") // POINTS + 1) == 0
        colour = {name: pl.lit(value) for name, value in _colour(comparison, run).items()}
        frames.append(means.filter(every).sort("metric", "step").with_columns(**colour))
    if not frames:
        return [], pl.DataFrame()
    points = pl.concat(frames).with_columns(pl.col("mean", "low", "high").round_sig_figs(5))
    names = points["metric"].unique(maintain_order=True).to_list()
    words = {name: text.format(unit=comparison.unit) for name, text in CURVES.items() if name in names}
    if "Utility" in words:
        words.pop("Reward_Mean", None)
    if not words:  # stages of training, each under its own name
        stages = [name for name in names if "/" in name and name.split("/")[0] not in CONTROLS]
        kept = [name for name in stages if name.endswith("/Accuracy_Mean")] or [
            name for name in stages if name.endswith("/Reward_Mean")
        ]
        words = {name: f"{name.split('/')[0]}: {CURVES[name.split('/')[1]]}".replace("_", " ") for name in kept}
    points = points.filter(pl.col("metric").is_in(list(words)))
    return list(words.values()), points.with_columns(pl.col("metric").replace(words).alias("panel")).drop("metric")
