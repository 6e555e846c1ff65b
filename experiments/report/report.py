"""What a finished run found, in words, tables and charts: on the terminal and as `report.html`.

Reads only what the run left in its folder (`results.json`, `metrics.csv`, `config.yaml`), so that a report can be
written again at any time.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import polars as pl

from knobwise.experiments.report import charts, mean_report, page, selector_report
from knobwise.experiments.report.training_curves import training_curves
from knobwise.experiments.report.verdict import (
    LEARNED,
    ORACLE,
    STATIC,
    TERMS,
    WORDS,
    Row,
    budgets_of,
    grpo_begins,
    guarantees,
    interval,
    known,
    mean_of,
    means_of,
    number,
    policy_name,
    ranked,
    read_results,
    unit_of,
    verdict,
)
from knobwise.experiments.results import by_dataset

if TYPE_CHECKING:
    import altair as alt
    from rich.console import Console


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run's folder, from what lies there, and return its path.

    Raises:
        InputError: there is no `results.json`, or it is none.
    """
    folder = Path(run_folder).resolve()
    results = read_results(folder)
    title = f"{folder.parent.name} / {folder.name}"
    facts = selector_report.facts(results) if _of_selector(results) else _facts(results)
    own = _own_module(results)
    says, found = (own.verdict(results), own.sections(results)) if own else (verdict(results), _sections(results))
    parts = [
        f"<p class=soft>knobwise run report</p><h1>{html.escape(title)}</h1>",
        f"<p class=soft>{html.escape(' · '.join(facts))}</p>",
        f"<div class=verdict>{''.join(f'<p>{html.escape(words)}</p>' for words in says)}</div>",
        *found,
    ]
    parts += _chosen(results)
    parts += training_curves(folder / "metrics.csv", grpo_begins(results))
    parts += ["<h2>How to reproduce</h2>", _reproduce(folder, results)]
    if (folder / "config.yaml").exists():
        config = html.escape((folder / "config.yaml").read_text(encoding="utf-8"))
        parts.append(page.folded("The resolved configuration (config.yaml)", f"<pre>{config}</pre>"))
    return page.write_page(folder / "report.html", f"knobwise: {title}", parts)


def _of_selector(results: Mapping[str, Any]) -> bool:
    """Whether demonstrations were chosen, not configurations."""
    return results.get("system") == "selector"


def _of_means(results: Mapping[str, Any]) -> bool:
    """Whether the budgets limit the mean over requests."""
    return results.get("sense") == "mean"


def _own_module(results: Mapping[str, Any]) -> ModuleType | None:
    """What shows such results; None where this module does: under deadlines."""
    return selector_report if _of_selector(results) else mean_report if _of_means(results) else None


def _facts(results: Mapping[str, Any]) -> list[str]:
    """What was judged on what."""
    profile = results.get("profile", {})
    return [
        f"profile {profile.get('name', 'unnamed')}: {profile.get('samples', '?')} samples × "
        f"{profile.get('configurations', '?')} configurations",
        f"judged on the {results.get('split', 'test')} split ({results.get('test_samples', '?')} samples)",
        f"seeds {', '.join(map(str, results.get('seeds', [])))}",
        f"budgets {', '.join(page.quantity(budget, unit_of(results)) for budget in budgets_of(results))}",
    ]


def _sections(results: Mapping[str, Any]) -> list[str]:
    """Tables and charts for deadlines."""
    parts = [
        "<h2>Results</h2><p>Means over the budgets; the best policies come first.</p>",
        _table_of_means(results),
        page.folded("What the words mean", _glossary(results)),
        "<h2>Per budget</h2>",
        _table_per_budget(results, budgets_of(results)),
        *by_dataset.sections(results),
        *_guarantees(results),
    ]
    for name, (caption, chart) in result_charts(results).items():
        parts += [f"<h2>{name}</h2>", page.figure(chart, caption)]
    return parts


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """The results as a table, and the verdict; without colours and frames when this is no terminal."""
    learned = policy_name(LEARNED)
    if _of_selector(results):
        header, rows = selector_report.header(results), selector_report.cells(results)
        says = selector_report.verdict(results)
        learned, few = selector_report.learned(results), selector_report.few(results)
    elif _of_means(results):
        header, rows, says = mean_report.HEADER, mean_report.cells_of_means(results), mean_report.verdict(results)
        few = (0, 1, 3, 5)
    else:
        header, rows, says = _HEADER, [_cells(row, unit_of(results)) for row in ranked(results)], verdict(results)
        few = (0, 1, 2, 6)
    print_table(console, header, rows, few, learned)
    if lines := by_dataset.cells(results):
        header, few = by_dataset.columns(results)
        print_table(console, header, lines, few, learned, strong=1)
    for words in says:
        console.print(words, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    few: Sequence[int],
    learned: str,
    strong: int = 0,
) -> None:
    """The columns `few` where the terminal is narrow; the rows with `learned` in column `strong` are set apart."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    terminal = console.is_terminal
    shown = Table(box=box.SIMPLE_HEAD if terminal else None, header_style="bold", pad_edge=False)
    width = console.width if terminal else 400
    kept = range(len(header)) if width >= 130 else few if width >= 90 else few[:3]
    for place in kept:
        shown.add_column(header[place], justify="right" if place else "left", no_wrap=True)
    for row in rows:
        cells = [cell.replace("\n", " ") for cell in row]
        shown.add_row(*(cells[place] for place in kept), style="bold" if row[strong] == learned else None)
    wide = console if terminal else Console(file=console.file, width=width)
    wide.print(shown, markup=False, highlight=False)


# -- tables ------------------------------------------------------------------------------------------------------------

_HEADER = ["policy", "utility", "gap closed", "accuracy", "mean latency", "in time", "where possible", "decision"]


def _cells(row: Row, unit: str) -> list[str]:
    return [*by_dataset.judged_cells(row, unit), page.quantity(row.get("decision_us_p50"), "µs")]


def _table_of_means(results: Mapping[str, Any]) -> str:
    rows = ranked(results)
    strong = [i for i, row in enumerate(rows) if row["policy"] == LEARNED]
    return page.table(_HEADER, [_cells(row, unit_of(results)) for row in rows], strong)


def _table_per_budget(results: Mapping[str, Any], budgets: Sequence[float]) -> str:
    at = {(row["policy"], row["budget_ms"]): row for row in results["rows"] if row.get("budget_ms") is not None}
    policies = [row["policy"] for row in ranked(results)]
    unit = unit_of(results)
    cells = [[policy_name(policy), *(_cell_at(at.get((policy, b), {}), unit) for b in budgets)] for policy in policies]
    if any(known(row.get("infeasible")) for row in at.values()):
        shares = [number(at.get((policies[0], b), {}).get("infeasible"), ".1%") for b in budgets]
        cells.append(["infeasible\nlate under every configuration", *shares])
    strong = [i for i, policy in enumerate(policies) if policy == LEARNED]
    words = "<p>Utility, with its interval; below it accuracy, mean latency and the share in time.</p>"
    return words + page.table(["policy", *(page.quantity(budget, unit) for budget in budgets)], cells, strong)


def _cell_at(row: Row, unit: str) -> str:
    quality = f"{number(row.get('accuracy'), '.3f')} · {page.quantity(row.get('latency_ms_mean'), unit)}"
    kept = number(row.get("satisfaction"), ".1%", " in time")
    return f"{number(row.get('utility'), '.3f')}{interval(row.get('utility_ci95'), '.3f')}\n{quality}\n{kept}"


def _guarantees(results: Mapping[str, Any]) -> list[str]:
    """The guard, budget by budget."""
    budgets = guarantees(results)
    if not budgets:
        return []
    level = f"{100 * budgets[0][0]['level']:g}%"
    cells = []
    for rows in budgets:
        kept = [number(mean_of(rows, f"satisfaction_{w}"), ".1%") for w in ("before", "deployed", "static")]
        gain = f"{mean_of(rows, 'gain'):+z.3f}\n± {mean_of(rows, 'gain_se'):.3f}"
        price = number(mean_of(rows, "miss_price"), ".3g")
        cells.append([page.quantity(rows[0]["budget_ms"], unit_of(results)), *kept, price, gain, _decided(rows)])
    words = (
        f"Asked for: {level} of the requests in time, of those that some configuration could serve in time. A miss is "
        "given the lowest price that keeps this; where the policy is then not better than budget-aware static by more "
        "than chance, static decides. All of this was found on samples that the policy was not fitted on, by each seed "
        "for itself: shares, prices and gains are means over the seeds, a sentence is that of the first seed concerned."
    )
    header = ["budget", "in time before", "after", "static", "price κ", "gain over static", "what was decided"]
    return ["<h2>Guarantees</h2>", f"<p>{words}</p>", page.table(header, cells, words=[len(header) - 1])]


def _decided(rows: Sequence[Row]) -> str:
    """What was decided and why; where the seeds differ, how many decided what, and the reason of the first of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = "deployed" if row["deployed"] else "fell back"
        title += ", unattainable" * row["unattainable"] + ", too dear" * row["too_dear"]
        groups.setdefault(title, []).append(row)
    reasons = [of[0]["reason"] for of in groups.values()]
    if len(groups) == 1:
        return str(reasons[0]).replace("; ", "\n", 1)
    return "\n".join(["; ".join(f"{title}: {len(of)} of {len(rows)} seeds" for title, of in groups.items()), *reasons])


SETTINGS = {
    "ridge": "penalty",
    "kernel_ridge": "squared width of the kernel, penalty",
    "knn": "neighbours, whether features are weighed",
    "random_forest": "smallest leaf",
    "gradient_boosting": "number of trees",
}
"""What the settings of a member of a stack mean."""


def _chosen(results: Mapping[str, Any]) -> list[str]:
    """Weights, settings, iteration."""
    chosen = results.get("chosen")
    if not chosen:
        return []
    seeds = [str(seed) for seed in results.get("seeds", range(len(chosen)))]
    iterations = ", ".join(str(one["iteration"]) for one in chosen)
    words = f"<p>Chosen on held-out samples: the network of iteration {iterations} (seeds {', '.join(seeds)})"
    members = list(chosen[0]["weights"])
    if len(members) == 1:
        return ["<h2>What was chosen</h2>", f"{words}.</p>"]
    frame = pl.DataFrame(
        [
            {"member": policy_name(name), "seed": seed, "weight": one["weights"][name]}
            for name in members
            for seed, one in zip(seeds, chosen, strict=True)
        ]
    )
    cells = [
        [policy_name(name), SETTINGS.get(name, ""), "\n".join(dict.fromkeys(one["settings"][name] for one in chosen))]
        for name in members
        if name in chosen[0]["settings"]
    ]
    table = page.table(["expert", "what is set", "to what, in each seed"], cells, words=[1, 2])
    caption = "How much each member counts in the decision; a bar is the mean over the seeds, a dot one seed."
    return [
        "<h2>What was chosen</h2>",
        f"{words}, and beside it the experts with these weights.</p>",
        page.figure(charts.weights(frame), caption),
        page.folded("Settings of the experts", table),
    ]


def _glossary(results: Mapping[str, Any]) -> str:
    policies = [WORDS[name] for name in means_of(results) if name in WORDS]
    return f"<dl>{''.join(f'<dt>{a}</dt><dd>{html.escape(b)}</dd>' for a, b in [*TERMS.items(), *policies])}</dl>"


def _reproduce(folder: Path, results: Mapping[str, Any]) -> str:
    from knobwise import __version__

    command = results.get("command") or f"knobwise train experiment={folder.parent.name}"
    digest = results.get("profile", {}).get("digest", "unknown")
    return (
        f"<pre>{html.escape(str(command))}</pre>"
        f"<p>knobwise {__version__}; profile digest <code>{html.escape(digest)}</code>. The same profile, settings and "
        "seeds give the same numbers on the same kind of machine; decision times differ. Curves: "
        "<code>tensorboard --logdir tensorboard</code> in the run's folder, or "
        "<code>wandb sync wandb/offline-run-*</code> to send what was logged offline to Weights &amp; Biases.</p>"
    )


# -- charts ------------------------------------------------------------------------------------------------------------


def result_charts(results: Mapping[str, Any]) -> dict[str, tuple[str, alt.TopLevelMixin]]:
    """The charts that the results have numbers for: heading → (caption, chart)."""
    drawn: dict[str, tuple[str, alt.TopLevelMixin]] = {}
    means = means_of(results)
    others = [row["policy"] for row in ranked(results) if row["policy"] not in (LEARNED, STATIC, ORACLE)]
    named = {n: policy_name(n) for n in (LEARNED, STATIC, *others[:1], ORACLE) if n in means}
    order = [*named.values(), *([charts.OTHER] if len(others) > 1 else [])]
    numbers = ("accuracy", "latency_ms_mean", "utility", "satisfaction", "satisfaction_feasible")
    rows = [
        {"policy": named.get(row["policy"], charts.OTHER), "name": policy_name(row["policy"])}
        | {"budget_ms": float(row["budget_ms"]), **{name: row.get(name) for name in numbers}}
        | dict(zip(("low", "high"), row.get("utility_ci95") or (None, None), strict=True))
        for row in results["rows"]
        if row.get("budget_ms") is not None
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None).unique(maintain_order=True)
    strongest = f" The strongest other baseline is {policy_name(others[0])}." if others else ""
    if results.get("configurations"):
        dots = pl.DataFrame([{k: c[k] for k in ("label", "accuracy", "latency_ms")} for c in results["configurations"]])
        paths = frame.filter(pl.col("policy") != charts.OTHER) if rows else None
        if paths is not None:
            paths = paths.select("policy", "budget_ms", "accuracy", pl.col("latency_ms_mean").alias("latency_ms"))
        drawn["Accuracy and latency"] = (
            "Each grey dot is one configuration used for every test input, the dashed line joins those that no other "
            "beats. A coloured line is what a policy reached, one point per budget. Above the dashed line is what no "
            "single configuration gives." + strongest,
            charts.plane(dots, paths, list(named.values()), unit=unit_of(results)),
        )
    if rows:
        utility = frame.drop(c for c in ("low", "high") if frame[c].is_null().any())
        drawn["Utility against budget"] = (
            "Mean accuracy of answers, counted 0 when late; shaded: 95% intervals." + strongest,
            charts.by_budget(utility, "utility", "utility (0 to 1)", order, unit=unit_of(results)),
        )
        asked, kept = results.get("satisfaction_level"), frame.drop("low", "high")
        level = 0.95 if asked is None else float(asked)
        panels = [("satisfaction", "all requests in time"), ("satisfaction_feasible", "in time, where possible")]
        drawn["Keeping the budget"] = (
            f"Share of requests that met their budget; dashed: {level:.0%}{'' if asked is None else ', as asked for'}.",
            charts.side_by_side(
                [
                    charts.by_budget(
                        kept, y, t, order, percent=True, level=level, size=(350, 250), unit=unit_of(results)
                    )
                    for y, t in panels
                ]
            ),
        )
    usage = [
        row | {"policy": policy_name(row["policy"]), "value": str(row["value"])}
        for row in results.get("knob_usage", [])
    ]
    columns = [policy_name(n) for n in (LEARNED, STATIC, ORACLE)]
    usage = [row for row in usage if row["policy"] in columns]
    if usage:
        drawn["Which settings are used"] = (
            "Share of the test requests that each value of a knob gets, per budget.",
            charts.knob_usage(
                pl.DataFrame(usage, infer_schema_length=None).unique(maintain_order=True), columns, unit_of(results)
            ),
        )
    return drawn


def result_images(results: Mapping[str, Any]) -> dict[str, bytes]:
    """The same charts as pictures (PNG), for W&B: heading → bytes."""
    own = _own_module(results)
    drawn = own.result_charts(results) if own else result_charts(results)
    return {name: page.png(chart) for name, (_, chart) in drawn.items()}
