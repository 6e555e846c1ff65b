"""Collects the numbers of docs/results.md from the runs of both studies, in docs/results.json.

    python experiments/studies/study.py
    python experiments/studies/study.py study=experiments/studies/demonstrations.yaml seeds=[0,1,2]
    python docs/collect.py runs comparisons
    python docs/results.py

What is not finished stays as it was, with the commit that it is of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from results import ABLATIONS, KEPT, POLICIES, PROFILES, SELECTORS, Numbers

from knobwise.common.files import write_text
from knobwise.experiments.report.paired import differences
from knobwise.experiments.report.runs import read_runs

SIMPLE = (
    "gradient_boosting",
    "random_forest",
    "gaussian_process",
    "kernel_ridge",
    "ridge",
    "knn",
    "latency_only",
)
OF_ANOTHER_KIND = ("selector", "selector_careful", "selector_language", "selector_seeds")

SHOTS = {
    "selector": ("reference", ("question_similarity",)),
    "selector_language": ("recorded", ("similarity", "similarity_last")),
}
"""The runs of these that are shown at one to four shots, and what chooses the nearest there; the
last of these is compared with."""


def collect(runs: Path, comparisons: Path) -> Numbers:
    """Return the numbers of the page from the folders of both studies."""
    # what is not finished stays, with its commit
    earlier: Numbers = json.loads(KEPT.read_text(encoding="utf-8"))
    controllers = {}
    for profile in PROFILES:
        run = runs / "controller" / profile
        finished = is_finished(run)
        controllers[profile] = controller_of(run) if finished else earlier["controllers"][profile]
    earlier_rows = {(row["section"], row["profile"]): row for row in earlier["ablations"]}
    ablations = []
    for section in ABLATIONS:
        for profile in ("builtin", "calibrated"):
            path = comparisons / f"{section}_{profile}.json"
            run = runs / section / profile
            if is_finished(run) and path.exists():
                commit = {"commit": commit_of(read(run))}
                ablations.append(ablation_of(path, section, profile) | commit)
            else:
                ablations.append(earlier_rows[section, profile])
    means = {}
    for profile in ("builtin", "calibrated"):
        run = runs / "mean_budget" / profile
        means[profile] = mean_of(run) if is_finished(run) else earlier["means"][profile]
    unseen = {row["left_out"]: row for row in earlier["unseen"]}
    for results in sorted((runs / "leave_one_out").glob("calibrated*/results.json")):
        row = unseen_of(results.parent)
        unseen[row["left_out"]] = row
    selectors, shots = {}, earlier.get("shots", {})
    for experiment in SELECTORS:
        run = runs / experiment / "reference"
        finished = is_finished(run)
        selectors[experiment] = selector_of(run) if finished else earlier["selectors"][experiment]
    for experiment, (name, nearest) in SHOTS.items():
        if is_finished(run := runs / experiment / name):
            shots[experiment] = shots_of(read(run), nearest)
    return {
        "controllers": controllers,
        "ablations": ablations,
        "means": means,
        "unseen": list(unseen.values()),
        "selectors": selectors,
        "shots": shots,
    }


def is_finished(run: Path) -> bool:
    """Return whether a run has results; say so if it has none."""
    finished = (run / "results.json").exists()
    if not finished:
        print(f"kept as it was, since it is not finished: {run}")
    return finished


def commit_of(results: Numbers) -> str:
    """Return the commit that trained a run, by its first eight digits."""
    commit: str = results["run"]["commit"][:8]
    return commit


def read(run: Path) -> Numbers:
    results: Numbers = json.loads((run / "results.json").read_text(encoding="utf-8"))
    return results


def rounded(middle: float, ci95: list[float]) -> list[float]:
    """Return a difference and its interval in points."""
    return [round(100 * value, 2) for value in (middle, *ci95)]


def controller_of(run: Path) -> Numbers:
    """Return what the page says about a controller and what it is compared with."""
    results = read(run)
    rows = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    learned = rows["controller"]
    best = max(SIMPLE, key=lambda name: rows[name]["utility"])
    numbers = {
        "commit": commit_of(results),
        "test_samples": results["test_samples"],
        "configurations": results["profile"]["configurations"],
        "utility": {name: round(rows[name]["utility"], 3) for name in POLICIES if name in rows},
        "free": round(learned["utility_free"], 3),
        "over_static": rounded(learned["over_static"], learned["over_static_ci95"]),
        "gap_closed": rounded(learned["gap_closed"], learned["gap_closed_ci95"]),
        "best": best,
        "over_best": over(run, best),
    }
    if "attainable" in results:
        estimate = results["attainable"]
        numbers["attainable"] = rounded(estimate["gain"], estimate["gain_ci95"])
    if "grpo_gain" in results:
        gain = results["grpo_gain"]
        numbers["grpo"] = rounded(gain["test"], gain["test_ci95"])
        numbers["grpo_held_out"] = rounded(gain["held_out"], gain["held_out_ci95"])
        numbers["grpo_last"] = last_of(run, results["training"]["warmup_iterations"])
    return numbers


def last_of(run: Path, start: int) -> list[float]:
    """Return what GRPO, which starts at this iteration, changes on held-out samples until its last
    evaluation, in points, and its iterations until then; both are means over seeds."""
    metrics = pl.read_csv(run / "metrics.csv", infer_schema_length=None)
    evaluations = metrics.drop_nulls("Val/Utility").sort("step")
    before = evaluations.filter(pl.col("step") <= start)
    first, last = (
        part.group_by("seed").agg(pl.col("step", "Val/Utility").last()).mean()
        for part in (before, evaluations)
    )
    change = 100 * float(last["Val/Utility"][0] - first["Val/Utility"][0])
    return [round(change, 2), round(float(last["step"][0]) - start)]


def over(run: Path, baseline: str) -> list[float] | None:
    """Return controller − baseline with its interval; None for a profile that was split several
    times, which is not tested."""
    (read_run,) = read_runs([run])
    policies = (baseline, "controller")
    tested, _ = differences(read_run, read_run, policies, read_run.conditions)
    for difference in tested:
        if difference.condition is None:
            return rounded(difference.difference, list(difference.ci95))
    return None


def ablation_of(path: Path, section: str, profile: str) -> Numbers:
    """Return what a section changes: the last difference of its comparison, with the p that is not
    corrected for the number of runs there, since the page corrects for all of its rows."""
    row = json.loads(path.read_text(encoding="utf-8"))["differences"][-1]
    points = rounded(row["difference"], row["ci95"])
    return {"section": section, "profile": profile, "points": points, "p": row["p"]}


def mean_of(run: Path) -> Numbers:
    """Return the gain under mean budgets over the static mix, in points of accuracy."""
    results = read(run)
    rows = results["rows"]
    (row,) = (row for row in rows if row["policy"] == "controller" and row["budget_ms"] is None)
    points = rounded(row["over_static_mix"], row["over_static_mix_ci95"])
    return {"commit": commit_of(results), "points": points, **held_out_of(results)}


def held_out_of(results: Numbers) -> Numbers:
    """Return what GRPO adds on held-out samples."""
    gain = results["grpo_gain"]
    return {"grpo_held_out": rounded(gain["held_out"], gain["held_out_ci95"])}


def unseen_of(run: Path) -> Numbers:
    """Return the gain on a data set that was left out."""
    results = read(run)
    rows = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    learned = rows["controller"]
    (left_out,) = (word for word in results["command"].split() if "split.leave_out=" in word)
    points = rounded(learned["over_static"], learned["over_static_ci95"])
    name = left_out.split("=")[1].strip("'")
    commit = commit_of(results)
    return {"left_out": name, "points": points, "commit": commit, **held_out_of(results)}


def selector_of(run: Path) -> Numbers:
    """Return the accuracy of every policy with two and four shots, and what the variants gain."""
    results = read(run)
    accuracy: dict[str, dict[str, float]] = {}
    for row in [*results["rows"], *results.get("controls", [])]:
        if row["shots"] in (2, 4):
            accuracy.setdefault(row["policy"], {})[str(row["shots"])] = round(row["accuracy"], 3)
    gains = []
    for row in results["differences"]:
        if row["shots"] == results["trained_shots"]:
            points = rounded(row["difference"], row["ci95"])
            gains.append({"policy": row["policy"], "against": row["against"], "points": points})
    # variants are compared with the first one, or with RCE where each is of another kind
    first = ""
    if results["experiment"] not in OF_ANOTHER_KIND:
        first = results["variants"][0]
    queries = results["test_queries"]
    return {
        "commit": commit_of(results),
        "queries": queries,
        "first": first,
        "accuracy": accuracy,
        "gains": gains,
    }


def shots_of(results: Numbers, nearest: Sequence[str]) -> Numbers:
    """Return what each stage of a selector gains over the one before, and the last over the nearest
    and over random demonstrations, at each number of shots."""
    share: dict[str, list[float]] = {name: [] for name in ("random", *nearest)}
    rival = nearest[-1]
    for row in results["rows"]:
        if row["policy"] in share:
            share[row["policy"]].append(round(row["accuracy"], 3))
    stages = [("sft", rival), ("rce", "sft"), ("grpo_recorded", "rce")]
    if "grpo_live" in results["variants"]:
        stages.append(("grpo_live", "rce"))
    last, _ = stages[-1]
    pairs = [*stages, (last, rival), (last, "random")]
    gains: dict[str, list[list[float]]] = {" − ".join(pair): [] for pair in pairs}
    for row in results["differences"]:
        pair = f"{row['policy']} − {row['against']}"
        if pair in gains:
            gains[pair].append(rounded(row["difference"], row["ci95"]))
    # a table has a cell for each number of shots
    assert {len(cells) for cells in gains.values()} == {len(results["shots"])}, gains
    commit = commit_of(results)
    return {"commit": commit, "shots": results["shots"], "share": share, "gains": gains}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    numbers = collect(*map(Path, sys.argv[1:]))
    write_text(KEPT, json.dumps(numbers, indent=1) + "\n")
    print(f"written: {KEPT}")
