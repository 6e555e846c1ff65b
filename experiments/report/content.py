"""The numbers of one finished run or of several: on what they were judged, those to be seen first,
the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from knobwise.common.progress import duration
from knobwise.common.words import format_number, is_known
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.evidence.results import (
    baselines,
    differences_at,
    not_known,
    unit_of,
)
from knobwise.experiments.evidence.schema import RunFacts, RunResults
from knobwise.experiments.evidence.statistics import Difference
from knobwise.experiments.evidence.task import (
    ACCURACY,
    ATTAINED,
    DECISION,
    FEASIBLE,
    FREE,
    ON_TIME,
    OVER_SINGLE,
    PRICE,
    Metric,
    Row,
    shown_at,
    task_of,
)
from knobwise.experiments.report import words
from knobwise.experiments.report.between_runs import condition_name, p_words
from knobwise.experiments.report.comparison import Comparison, Entry
from knobwise.experiments.report.tables import Table, Tile, gain_tile, reword_costs, table_of
from knobwise.experiments.report.words import cell, policy_name, seeds_words

# -- the head of a page ----------------------------------------------------------------------------


def when_made(run: RunFacts | None) -> str:
    """Say when the run was made, how long it took and with which code; "" if that is not known."""
    if not run:
        return ""
    commit, _, dirty = (run["commit"] or "unknown").partition("-")
    code = f"{commit[:9]}-{dirty}".removesuffix("-")
    return f"{run['started']} UTC · took {duration(run['seconds'])} · commit {code}"


def judged_on(comparison: Comparison) -> str:
    """Say what the runs were trained and judged on."""
    results = comparison.reference.results
    task = comparison.task
    profile: Row = results.get("profile") or {}
    sizes = []
    for key in ("samples", "configurations", "candidates"):
        if key in profile:
            sizes.append(f"{profile[key]:,} {key}")
    judged = f"{format_number(results.get(f'test_{task.samples}'), ',.0f')} {task.samples}"
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
        f"{task.condition_words[1]} {conditions}",
    ]
    every_seeds = [run.results.get("seeds") or [] for run in comparison.runs]
    if every_seeds[0] and every_seeds.count(every_seeds[0]) == len(every_seeds):
        facts.insert(2, seeds_words(every_seeds[0]))
    if not comparison.single:
        facts.insert(0, f"compared with {comparison.reference.label}")
    return in_words(" · ".join(facts), comparison.unit)


def tiles_of(comparison: Comparison) -> list[Tile]:
    """Return the numbers to be seen first: what each of several runs gains over the first one, or
    of the policy that stands for the run its gain over static, or of selectors over the strongest
    simple baseline, its share on time or accuracy, and the time of a decision."""
    if not comparison.single:
        tested = [(f"{e.run} against {e.against}", asdict(e)) for e in comparison.differences[:3]]
        return [gain_tile(text, gain["difference"], gain["ci95"]) for text, gain in tested]
    run = comparison.reference
    task = comparison.task
    row: Row = comparison.rows[0]
    key = (*task.compared, "")[0]
    against = task.low
    gain: Row = {"difference": row.get(key), "ci95": row.get(f"{key}_ci95")}
    if not task.averaged:
        against = (*baselines(run.results), "")[0]
        gain = differences_at(run.results, shown_at(run.results)).get((run.policy, against), {})
    tiles = []
    if is_known(gain.get("difference")):
        gained = f"of {task.score} against {policy_name(against)}"
        tiles.append(gain_tile(gained, gain["difference"], gain["ci95"]))
    # of requests outside the profile it is not known which are feasible
    shares = (FEASIBLE, ON_TIME, ACCURACY)
    judged = next((each for each in shares if is_known(row.get(each.key))), ACCURACY)
    for metric in (judged, DECISION):
        value, _, detail = cell(row, metric).partition("\n")
        if metric is judged and (unknown := not_known(row)):
            tiles.append(Tile("–", metric.name, unknown, unsure=True))
            continue
        if metric in (FEASIBLE, ON_TIME):
            others = run.row(against, comparison.main)
            detail = f"{policy_name(against)}: {cell(others, metric)}"
        if metric.key in row:
            tiles.append(Tile(value, metric.name, detail))
    return tiles


# -- tables ----------------------------------------------------------------------------------------


def name_of_entry(entry: Entry) -> str:
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
        left_out = [FREE, OVER_SINGLE]
        if not task.equal_latency:
            # where latency is converted to accuracy, decisions are not part of the difference
            left_out.append(DECISION)
    elif comparison.unit not in TIMES:
        # decisions are not charged, so that they are free in any case
        left_out = [FREE]
    metrics = [
        metric
        for metric in metrics
        if metric not in left_out
        and (
            any(is_known(row.get(metric.key)) for row in rows)
            # where it says why a number is not known
            or (metric.key == task.ranked_by and any(map(not_known, rows)))
        )
    ]
    return sorted(metrics, key=lambda metric: metric.key != task.ranked_by)


def main_table(comparison: Comparison) -> Table:
    """Return the metrics at the main condition, see `table_at`."""
    return table_at(comparison, comparison.main)


def table_at(comparison: Comparison, condition: float | None) -> Table:
    """Return the metrics at a condition: a row for each policy of a run, or for each of several
    runs with its difference to the first one, and the reference policies."""
    entries = comparison.listed()
    # of selectors, the main condition is tested among all numbers of shots as well
    is_main = condition == comparison.main
    family = comparison.differences if is_main else comparison.by_condition
    tested = {each.run: each for each in family if each.condition == condition}
    rows = [entry.run.row(entry.policy, condition) for entry in entries]
    metrics = _metrics(comparison, rows)
    lines = []
    for entry, row in zip(entries, rows, strict=True):
        name = name_of_entry(entry)
        line = {"policy": name}
        if not comparison.single:
            line = {"run": name} | tested_cells(tested.get(name))
        cells = {each.name: cell(row, each, comparison.unit) for each in metrics}
        if unknown := not_known(row):
            cells[metrics[0].name] = unknown
        lines.append(line | cells)
    return reword_costs(table_of(lines, _strong(comparison)), comparison.unit)


def tested_cells(difference: Difference | None) -> dict[str, str]:
    """Return two cells: the difference in points with its interval and p, and what they show."""
    if difference is None:
        return {"gain, points": "–", "shown": "–"}
    # a terminal shows the first line of a cell alone
    text = words.difference_cell(asdict(difference)).replace("\n", " ")
    return {"gain, points": f"{text}\np {p_words(difference)}", "shown": words.shown_by(difference)}


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
            if metric not in (DECISION, PRICE) and (metric is not FREE or unit in TIMES):
                line[metric.name] = cell(row, metric, unit)
                if metric.key == task.ranked_by:
                    line[metric.name] = not_known(row) or line[metric.name]
        lines.append(line)
    return reword_costs(table_of(lines, list(map(policy_name, task.trained))), unit)
