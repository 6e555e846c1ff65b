"""What a page says of one finished run or of several: the answer, one table, sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from knobwise.common.progress import duration
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.compare.comparison import Comparison, Entry
from knobwise.experiments.evidence.results import (
    baselines,
    differences_at,
    known,
    rows_at,
    unit_of,
)
from knobwise.experiments.evidence.schema import PolicyRows, RunFacts, RunResults
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.evidence.task import (
    ACCURACY,
    ATTAINED,
    DECISION,
    FEASIBLE,
    FREE,
    GAP,
    OVER_SINGLE,
    Metric,
    Row,
    shown_at,
    task_of,
)
from knobwise.experiments.report.tables import Content, Table, Tile, gain_tile, reworded, table_of
from knobwise.experiments.wording import words
from knobwise.experiments.wording.between_runs import between_runs, condition_name, p_words
from knobwise.experiments.wording.sentences import verdict
from knobwise.experiments.wording.words import cell, number, policy_name


def content_of(comparison: Comparison) -> Content:
    """Return what a page says of these runs, but for its details and figures."""
    run = comparison.reference
    table = main_table(comparison)
    if comparison.single:
        lead, *sentences = verdict(run.results)
        return Content(
            "knobwise run report",
            run.label,
            lead,
            table,
            [*sentences, *run.results.get("warnings", [])],
            [_when(run.results.get("run")), _facts(comparison)],
            reworded(_tiles(run.results), comparison.unit),
        )
    lead, *sentences = reworded(between_runs(comparison), comparison.unit)
    tiles = [
        gain_tile(f"{each.run} against {each.against}", each.difference, each.ci95)
        for each in comparison.differences[:3]
    ]
    name = f"{len(comparison.runs)} runs"
    sentences += comparison.notes
    return Content("knobwise comparison", name, lead, table, sentences, [_facts(comparison)], tiles)


# -- the head of the page --------------------------------------------------------------------------


def _when(run: RunFacts | None) -> str:
    """Say when the run was made, how long it took and with which code; "" if that is not known."""
    if not run:
        return ""
    commit, _, dirty = (run["commit"] or "unknown").partition("-")
    code = f"{commit[:9]}-{dirty}".removesuffix("-")
    return f"{run['started']} UTC · took {duration(run['seconds'])} · commit {code}"


def _facts(comparison: Comparison) -> str:
    """Say what the runs were trained and judged on."""
    results = comparison.reference.results
    task = comparison.task
    profile: Row = results.get("profile") or {}
    sizes = []
    for key in ("samples", "configurations", "candidates"):
        if key in profile:
            sizes.append(f"{profile[key]:,} {key}")
    judged = f"{number(results.get(f'test_{task.samples}'), ',.0f')} {task.samples}"
    if results.get("test_clusters"):
        judged += f" of {results['test_clusters']:,} groups"
    if "test_candidates" in results:
        judged += f" with their own bank of {results['test_candidates']:,} candidates"
    if splits := results.get("split_seeds"):
        judged += f" in {len(splits)} splits, of which the first is deployed"
    conditions = ", ".join(condition_name(comparison, each) for each in comparison.conditions)
    facts = [
        f"profile {profile.get('name', 'unnamed')}: {', '.join(sizes)}".removesuffix(": "),
        f"judged on {judged}",
        f"seeds {', '.join(map(str, results.get('seeds', [])))}",
        f"{task.condition_words[1]} {conditions}",
    ]
    if not comparison.single:
        facts.insert(0, f"compared with {comparison.reference.label}")
    return in_words(" · ".join(facts), comparison.unit)


def _tiles(results: RunResults) -> list[Tile]:
    """Return the numbers to be seen first, of the policy that stands for the run: what it gains,
    its share on time or accuracy, and the time of a decision."""
    task = task_of(results)
    policy = task.main_policy(results) or ""
    rows = rows_at(results, task.main_condition(results))
    row: Row = rows.get(policy, {})
    tiles = []
    # what it gains over static, or of selectors over the strongest simple baseline
    gain: Row
    if task.averaged:
        key = task.compared[0]
        against = task.low
        gain = {"difference": row.get(key), "ci95": row.get(f"{key}_ci95")}
    else:
        (against,) = baselines(results)[:1] or [""]
        gain = differences_at(results, shown_at(results)).get((policy, against), {})
    if known(gain.get("difference")):
        gained = f"of {task.score} against {policy_name(against)}"
        tiles.append(gain_tile(gained, gain["difference"], gain["ci95"]))
    second = FEASIBLE if FEASIBLE in task.metrics else ACCURACY
    for metric in (second, DECISION):
        value, _, detail = cell(row, metric).partition("\n")
        if metric is FEASIBLE:
            detail = f"{policy_name(against)}: {cell(rows.get(against, {}), metric)}"
        if metric.key in row:
            tiles.append(Tile(value, metric.name, detail))
    return tiles


# -- tables ----------------------------------------------------------------------------------------


def name_of(entry: Entry) -> str:
    """Return what a policy of a run is called beside the others."""
    if entry.stands_for_run:
        return entry.run.label
    return policy_name(entry.policy, entry.run.results)


def _strong(comparison: Comparison) -> list[str]:
    """Return the names in bold: the first run, or the policies that a run trained; of selectors the
    one that stands for it."""
    run = comparison.reference
    if not comparison.single:
        return [run.label]
    trained = run.task.trained if run.task.averaged else (run.policy,)
    return [policy_name(name, run.results) for name in trained]


def _metrics(comparison: Comparison, rows: Sequence[Row]) -> list[Metric]:
    """Return the columns of numbers that some row has, first the one that rows are ranked by."""
    task = comparison.task
    metrics = list(task.metrics)
    left_out = []
    if not comparison.single:
        metrics.append(ATTAINED)
        left_out = [FREE, DECISION, OVER_SINGLE]
    elif comparison.unit not in TIMES:
        # decisions are not charged, so that they are free in any case
        left_out = [FREE]
    metrics = [
        metric
        for metric in metrics
        if metric not in left_out and any(known(row.get(metric.key)) for row in rows)
    ]
    return sorted(metrics, key=lambda metric: metric.key != task.ranked_by)


def main_table(comparison: Comparison) -> Table:
    """Return the metrics at the main condition: a row for each policy of a run, or for each of
    several runs with its difference to the first one, and the reference policies."""
    entries = comparison.listed()
    tested = {difference.run: difference for difference in comparison.differences}
    rows = [entry.run.row(entry.policy, comparison.main) for entry in entries]
    metrics = _metrics(comparison, rows)
    lines = []
    for entry, row in zip(entries, rows, strict=True):
        name = name_of(entry)
        line = {"policy": name}
        if not comparison.single:
            line = {"run": name} | tested_cells(tested.get(name))
        lines.append(line | {each.name: cell(row, each, comparison.unit) for each in metrics})
    return reworded(table_of(lines, _strong(comparison)), comparison.unit)


def tested_cells(difference: Difference | None) -> dict[str, str]:
    """Return two cells: the difference in points with its interval and p, and what they show."""
    if difference is None:
        return {"gain, points": "–", "shown": "–"}
    # a terminal shows the first line of a cell alone
    text = words.difference_cell(asdict(difference)).replace("\n", " ")
    return {"gain, points": f"{text}\np {p_words(difference)}", "shown": words.shown_by(difference)}


def by_condition(comparison: Comparison, key: PolicyRows = "rows") -> Table:
    """Return a cell for each budget or number of shots: the score with its interval, and in small
    print what was spent for it, or the difference to the first run.

    Args:
        comparison: whose policies or runs have a row each.
        key: the key of the rows in the results: "rows", of a selector also "controls" or "votes".
    """
    unit = comparison.unit
    reference = comparison.reference
    # all metrics but those that need another policy or no budget
    others = {metric.key for metric in (FREE, GAP, FEASIBLE, DECISION)}
    metrics = [metric for metric in comparison.task.metrics if metric.key not in others]
    entries = comparison.listed()
    if key != "rows":
        judged = sorted(
            rows_at(reference.results, shown_at(reference.results), key).values(),
            key=lambda row: -row["accuracy"],
        )
        entries = [Entry(reference, row["policy"]) for row in judged]
    tested = {(each.run, each.condition): each for each in comparison.by_condition}
    trained = reference.results.get("trained_shots")
    lines = []
    for entry in entries:
        line = {"policy": name_of(entry)}
        for condition in comparison.conditions:
            row: Row = entry.run.row(entry.policy, condition)
            if key == "votes":
                row = rows_at(reference.results, condition, key).get(entry.policy, {})
            # the score in large, all else in small print
            text = [f"{metric.name} {cell(row, metric, unit)}" for metric in metrics[1:]]
            if known(row.get("price")):
                text.append(f"λ = {row['price']:.3g} per {unit}")
            if difference := tested.get((entry.run.label, condition)):
                text = list(tested_cells(difference).values()) if entry.stands_for_run else []
            heading = condition_name(comparison, condition)
            heading += " (trained)" * (condition == trained)
            small = [in_words(part, unit) for part in text]
            line[heading] = "\n".join([cell(row, metrics[0]), *small])
        lines.append(line)
    return reworded(table_of(lines, _strong(comparison)), unit)


def by_dataset(results: RunResults) -> Table:
    """Return the most important policies in each data set; no rows if there is only one data
    set."""
    task = task_of(results)
    unit = unit_of(results)
    lines = []
    for row in results.get("by_dataset", []):
        title = f"{row['dataset']}, {row['samples']} samples"
        line = {"data set": title, "policy": policy_name(row["policy"])}
        for metric in task.metrics:
            if metric is not DECISION and (metric is not FREE or unit in TIMES):
                line[metric.name] = cell(row, metric, unit)
        lines.append(line)
    return reworded(table_of(lines, list(map(policy_name, task.trained))), unit)


def settings_table(settings: Mapping[str, Sequence[Any]], labels: Sequence[str]) -> Table:
    """Return the settings that differ, with a column for each run."""
    return Table(["setting", *labels], [[key, *values] for key, values in settings.items()])
