"""Writes the tables of docs/results.md, and its chart, from the runs of both studies.

python experiments/studies/study.py
python experiments/studies/study.py study=experiments/studies/demonstrations.yaml seeds=[0,1,2]
python docs/results.py runs comparisons

Numbers are kept in docs/results.json; without folders the tables and the chart are made from it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

KEPT = Path(__file__).with_name("results.json")
PAGE = KEPT.with_suffix(".md")
CHART = KEPT.with_suffix(".svg")
BEGIN = "<!-- tables of results.json -->\n"
END = "<!-- end of tables -->\n"

PROFILES = {
    "builtin": "built-in",
    "ocr": "RapidOCR",
    "smollm": "SmolLM2",
    "calibrated": "calibrated",
    "python_files": "Python files",
    "digits": "digits",
    "breast_cancer": "breast cancer",
    "diabetes": "diabetes",
}
POLICIES = {
    "controller": "**controller**",
    "teacher": "teacher",
    "gradient_boosting": "gradient boosting",
    "random_forest": "random forest",
    "kernel_ridge": "kernel ridge",
    "gaussian_process": "Gaussian process",
    "ridge": "ridge",
    "knn": "nearest neighbours",
    "latency_only": "latency only",
    "budget_aware_static": "budget-aware static",
    "static_per_dataset": "static per data set",
    "best_static": "best static",
    "lookup_table": "lookup table",
    "random": "random",
    "oracle": "oracle",
}
SIMPLE = (
    "gradient_boosting",
    "random_forest",
    "gaussian_process",
    "kernel_ridge",
    "ridge",
    "knn",
    "latency_only",
)
ABLATIONS = {
    "lean": ("a teacher without base learners", "`lean` − `controller`"),
    "warm_up_only": ("… and no GRPO after it", "`warm_up_only` − `lean`"),
    "heads": (
        "heads that learn from reward alone",
        "`heads policy=independent` − `policy=utility`",
    ),
    "objective": (
        "… by 16 draws, not by every configuration",
        "`objective loss=sampled` − `exact`",
    ),
    "rce_only": ("… by RCE without GRPO", "`rce_only` − `objective`"),
    "cold_start": ("… by GRPO without RCE", "`cold_start` − `objective`"),
    "ppo": ("… by PPO with a value network", "`ppo loss=ppo` − `sampled`"),
    "seeds": ("the original system's settings", "`seeds` − `lean`"),
    "seeds_small": ("… with 500 K parameters", "`seeds_small` − `seeds`"),
}
"""Section of the study → what it changes, and what is compared."""
SELECTORS = {
    "selector": "What post-training gains",
    "selector_language": "SmolLM2",
    "selector_reward_model": "A learned reward",
    "selector_careful": "Careful annotators alone",
    "selector_groups": "Which sequences form a group",
    "selector_rewards": "Reward modes (plan 1)",
    "selector_advantages": "Advantages (plan 2)",
    "selector_weights": "Weights of the reward (plan 3)",
    "selector_warm_up": "RCE before GRPO",
    "selector_kl": "The KL to the SFT policy",
    "selector_curriculum": "The best sequences first",
    "selector_seeds": "The original selector",
}
OF_ANOTHER_KIND = ("selector", "selector_careful", "selector_language", "selector_seeds")

TASKS = {
    "selector": "built-in",
    "selector_careful": "built-in, careful annotators alone",
    "selector_language": "SmolLM2",
}
"""Experiments that compare ways of choosing, each with its own answers."""
NEAREST = {"selector": "question_similarity", "selector_language": "similarity"}
"""The nearest demonstrations of these, by how near their queries are."""

Numbers = dict[str, Any]


# -- from the runs ---------------------------------------------------------------------------------


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
        if experiment in NEAREST and finished:
            shots[experiment] = shots_of(run, NEAREST[experiment])
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
    import polars as pl

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
    from knobwise.experiments.report.paired import differences
    from knobwise.experiments.report.runs import read_runs

    (read_run,) = read_runs([run])
    policies = (baseline, "controller")
    tested, _ = differences(read_run, read_run, policies, read_run.conditions)
    for difference in tested:
        if difference.condition is None:
            return rounded(difference.difference, list(difference.ci95))
    return None


def ablation_of(path: Path, section: str, profile: str) -> Numbers:
    """Return what a section changes: the last difference of its comparison."""
    row = json.loads(path.read_text(encoding="utf-8"))["differences"][-1]
    points = rounded(row["difference"], row["ci95"])
    return {"section": section, "profile": profile, "points": points, "shown": row["shown"]}


def mean_of(run: Path) -> Numbers:
    """Return the gain under mean budgets over the static mix, in points of accuracy."""
    results = read(run)
    rows = results["rows"]
    (row,) = (row for row in rows if row["policy"] == "controller" and row["budget_ms"] is None)
    points = rounded(row["over_static_mix"], row["over_static_mix_ci95"])
    return {"commit": commit_of(results), "points": points}


def unseen_of(run: Path) -> Numbers:
    """Return the gain on a data set that was left out."""
    results = read(run)
    rows = {row["policy"]: row for row in results["rows"] if row["budget_ms"] is None}
    learned = rows["controller"]
    (left_out,) = (word for word in results["command"].split() if "split.leave_out=" in word)
    points = rounded(learned["over_static"], learned["over_static_ci95"])
    name = left_out.split("=")[1].strip("'")
    return {"left_out": name, "points": points, "commit": commit_of(results)}


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


def shots_of(run: Path, nearest: str) -> Numbers:
    """Return what each stage of a selector gains over the one before, and GRPO over the nearest and
    over random demonstrations, at each number of shots."""
    results = read(run)
    share: dict[str, list[float]] = {"random": [], nearest: []}
    for row in results["rows"]:
        if row["policy"] in share:
            share[row["policy"]].append(round(row["accuracy"], 3))
    learned = [("sft", nearest), ("rce", "sft"), ("grpo_recorded", "rce"), ("grpo_live", "rce")]
    pairs = [*learned, ("grpo_live", nearest), ("grpo_live", "random")]
    gains: dict[str, list[list[float]]] = {" − ".join(pair): [] for pair in pairs}
    for row in results["differences"]:
        pair = f"{row['policy']} − {row['against']}"
        if pair in gains:
            gains[pair].append(rounded(row["difference"], row["ci95"]))
    return {"shots": results["shots"], "share": share, "gains": gains}


# -- the page --------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A difference that the chart shows."""

    section: str
    label: str
    kind: str
    """A key of `KINDS`."""
    shown: bool
    """Whether it is better or worse by more than chance."""
    points: list[float]
    """The difference and its interval."""


def text_of(points: list[float] | None) -> str:
    """Write a difference with its interval, in points."""
    if points is None:
        return "–"
    middle, low, high = (f"{round(value, 1) + 0.0:.1f}".replace("-", "−") for value in points)
    sign = "+" * (round(points[0], 1) > 0)
    return f"{sign}{middle} [{low}, {high}]"


def emphasised(points: list[float] | None, shown: bool) -> str:
    """Write a difference, in bold where it is shown."""
    return f"**{text_of(points)}**" if shown else text_of(points)


def excludes_0(points: list[float] | None) -> bool:
    return points is not None and (points[1] > 0 or points[2] < 0)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in [header, *rows]]
    lines.insert(1, "|---" * len(header) + "|")
    return "\n".join(lines) + "\n"


def tables(numbers: Numbers) -> str:
    """Return the part of the page that holds tables."""
    parts = [
        ("The controller", controllers_table(numbers["controllers"])),
        ("What GRPO adds to the policy", grpo_table(numbers["controllers"])),
        ("Every policy", policies_table(numbers["controllers"])),
        ("What each part of the training adds", ablations_table(numbers["ablations"])),
        ("Mean budgets, and data sets never seen", others_table(numbers)),
        ("Choosing demonstrations", choices_table(numbers["selectors"])),
        ("At one to four shots", shots_table(numbers["shots"])),
        ("What changes a selector", selectors_table(numbers["selectors"])),
    ]
    texts = []
    for title, body in parts:
        texts.append(f"## {title}\n\n{ABOUT[title]}\n\n{body}")
    texts.append(commits_of(numbers))
    return "\n".join(texts)


def commits_of(numbers: Numbers) -> str:
    """Return a paragraph that says of which commits the runs are, those of most runs last."""
    runs = [
        (row["commit"], f"the controller of {PROFILES[name]}")
        for name, row in numbers["controllers"].items()
    ]
    for row in numbers["ablations"]:
        runs.append((row["commit"], f"`{row['section']}` ({PROFILES[row['profile']]})"))
    for profile, row in numbers["means"].items():
        runs.append((row["commit"], f"`mean_budget` ({PROFILES[profile]})"))
    for row in numbers["unseen"]:
        runs.append((row["commit"], f"`split.leave_out={row['left_out']}`"))
    runs += [(row["commit"], f"`{name}`") for name, row in numbers["selectors"].items()]
    names: dict[str, list[str]] = {}
    for commit, name in runs:
        names.setdefault(commit, []).append(name)
    ordered = sorted(names, key=lambda commit: len(names[commit]))
    parts = [f"Of commit {commit}: {', '.join(names[commit])}." for commit in ordered[:-1]]
    return " ".join([*parts, f"All {'other ' * bool(parts)}runs: {ordered[-1]}."]) + "\n"


ABOUT = {
    "The controller": "`knobwise train experiment=controller profile=…`, five seeds: points of "
    "utility, a mean over five budgets, in bold where the interval excludes 0. Only the controller "
    "is charged for its decisions. *Predictable* is the [predictable "
    "gain](profiles.md#predictable-gain). Profiles that were split three times are not tested "
    "against the predictors.",
    "What GRPO adds to the policy": "Change in utility, in points, on the held-out samples that "
    "choose the iteration, at the last evaluation of GRPO, and its iterations until then (a mean "
    "over seeds); then the deployed policy minus the one before GRPO, which is kept where GRPO "
    "does not improve it.",
    "Every policy": "Utility × 100.",
    "What each part of the training adds": "Points of utility, five seeds, in bold where "
    "significant after Holm's correction.",
    "Mean budgets, and data sets never seen": "`experiment=mean_budget`: points of accuracy over "
    "the best random mix of static configurations. `-m experiment=leave_one_out`, which evaluates "
    "on the data set that training left out: points of utility over budget-aware static.",
    "Choosing demonstrations": "The share of right answers with two demonstrations, on test "
    "queries; three seeds. "
    "[Metrics](metrics.md#results) explains the policies.",
    "At one to four shots": "The share of right answers with the nearest and with random "
    "demonstrations, then differences in points: what each stage of training gains over the one "
    "before it, and GRPO over both. All train with two shots.",
    "What changes a selector": "Points with two demonstrations, in bold where the interval "
    "excludes 0. A reference has its share of right answers, too.",
}


def controllers_table(controllers: Numbers) -> str:
    """Return what the controller gains on each profile."""
    header = ["profile", "over static", "gap closed", "predictable"]
    header += ["over the best simple predictor"]
    rows = []
    for name, numbers in controllers.items():
        closed = numbers["gap_closed"]
        best = numbers.get("over_best")
        versus = POLICIES[numbers["best"]]
        if best is not None:
            versus = f"{emphasised(best, excludes_0(best))}, {versus}"
        gain = numbers["over_static"]
        row = [PROFILES[name], emphasised(gain, excludes_0(gain))]
        row += [f"{closed[0]:.0f} %".replace("-", "−")]
        row += [text_of(numbers.get("attainable")), versus]
        rows.append(row)
    return table(header, rows)


def grpo_table(controllers: Numbers) -> str:
    """Return what GRPO changes at its last evaluation, and in the deployed policy."""
    rows = []
    for name, numbers in controllers.items():
        if "grpo_last" in numbers:
            change, iterations = numbers["grpo_last"]
            shown = f"{change + 0.0:+.2f}".replace("-", "−")
            rows.append([PROFILES[name], str(iterations), shown, text_of(numbers["grpo"])])
    header = ["profile", "iterations", "at the last evaluation", "deployed, on test samples"]
    return table(header, rows)


def policies_table(controllers: Numbers) -> str:
    """Return the utility of every policy that all profiles have."""
    rows = []
    for policy, words in POLICIES.items():
        values = [numbers["utility"].get(policy) for numbers in controllers.values()]
        if None not in values:
            rows.append([words, *(f"{100 * value:.1f}" for value in values)])
    free = [f"{100 * numbers['free']:.1f}" for numbers in controllers.values()]
    rows.insert(1, ["controller, without overhead", *free])
    return table(["policy", *(PROFILES[name] for name in controllers)], rows)


def ablations_table(ablations: list[Numbers]) -> str:
    """Return the differences between experiments on two profiles."""
    # section → profile → cell
    cells: dict[str, dict[str, str]] = {}
    for row in ablations:
        shown = row["shown"] in ("better", "worse")
        cells.setdefault(row["section"], {})[row["profile"]] = emphasised(row["points"], shown)
    rows = []
    for section, by_profile in cells.items():
        row = list(ABLATIONS[section])
        rows.append(row + [by_profile.get(name, "–") for name in ("builtin", "calibrated")])
    return table(["what", "difference", "built-in", "calibrated"], rows)


def others_table(numbers: Numbers) -> str:
    """Return the gains under mean budgets and on unseen data sets."""
    rows = []
    for profile, mean in numbers["means"].items():
        points = mean["points"]
        cell = emphasised(points, excludes_0(points))
        rows.append([f"`mean_budget`, {PROFILES[profile]}", cell])
    for row in numbers["unseen"]:
        cell = emphasised(row["points"], excludes_0(row["points"]))
        rows.append([f"`split.leave_out={row['left_out']}`, calibrated", cell])
    return table(["experiment", "gain"], rows)


def choices_table(selectors: Numbers) -> str:
    """Return the accuracy of every way of choosing two demonstrations, for each task."""
    policies = dict.fromkeys(name for task in TASKS for name in selectors[task]["accuracy"])
    rows = []
    for policy in policies:
        row = [f"`{policy}`"]
        for task in TASKS:
            accuracy = selectors[task]["accuracy"].get(policy, {})
            row.append(f"{accuracy['2']:.3f}" if "2" in accuracy else "–")
        rows.append(row)
    return table(["policy", *TASKS.values()], rows)


def shots_table(shots: Numbers) -> str:
    """Return what each stage of a selector gains, with a column for each number of shots."""
    rows = []
    for experiment, numbers in shots.items():
        task = TASKS[experiment]
        for policy, shares in numbers["share"].items():
            rows.append([task, f"`{policy}`", *(f"{share:.3f}" for share in shares)])
        for pair, gains in numbers["gains"].items():
            policy, against = pair.split(" − ")
            cells = [emphasised(points, excludes_0(points)) for points in gains]
            rows.append([task, f"`{policy}` − `{against}`", *cells])
    columns = next(iter(shots.values()))["shots"]
    names = [f"{count} shot{'s' * (count > 1)}" for count in columns]
    return table(["task", "policy", *names], rows)


def selectors_table(selectors: Numbers) -> str:
    """Return what every learned policy gains, with a row for each experiment."""
    rows = []
    shared = set[str]()
    for experiment, numbers in selectors.items():
        reference = numbers["first"] or "rce"
        share = numbers["accuracy"][reference]["2"]
        start = f"`{reference}` {share:.3f}, {gain_of(numbers, reference, reference)}"
        gains = []
        for policy, accuracy in numbers["accuracy"].items():
            gain = gain_of(numbers, policy, reference)
            # SFT and RCE stand in the first experiment with them
            seen = f"{policy} {accuracy}"
            if gain and policy != reference and seen not in shared:
                gains.append(f"`{policy}` {gain}")
            shared.add(seen)
        # a line for each policy
        title = f"{SELECTORS[experiment]} (`{experiment}`)"
        rows.append([title, start, "<br>".join(gains)])
    return table(["experiment", "reference", "difference from it"], rows)


def gain_of(numbers: Numbers, policy: str, reference: str) -> str:
    """Return what a policy gains: a variant over the first one, other learned policies over what
    they start from, which is named where it is not the reference of the experiment."""
    against = against_of(numbers, policy)
    for row in numbers["gains"]:
        if (row["policy"], row["against"]) == (policy, against):
            cell = emphasised(row["points"], excludes_0(row["points"]))
            return cell if against == reference else f"{cell} over `{against}`"
    return ""


def against_of(numbers: Numbers, policy: str) -> str:
    """Return what a policy is compared with on the page; "" for nothing."""
    pairs = [row["against"] for row in numbers["gains"] if row["policy"] == policy]
    for against in (numbers["first"], "rce", "sft", "question_similarity"):
        if against in pairs:
            return against
    return ""


# -- the chart -------------------------------------------------------------------------------------

KINDS = {"builtin": "built-in", "ocr": "RapidOCR", "calibrated": "calibrated"}
KINDS |= {"small": "other profiles", "beams": "demonstrations"}


def differences(numbers: Numbers) -> list[Difference]:
    """Return what the chart shows, in the order of the page."""
    shown = []
    title = "controller − budget-aware static"
    for profile, row in numbers["controllers"].items():
        kind = profile if profile in KINDS else "small"
        points = row["over_static"]
        label = PROFILES[profile]
        shown.append(Difference(title, label, kind, excludes_0(points), points))
    title = "What each part adds"
    for row in numbers["ablations"]:
        label = ABLATIONS[row["section"]][1].replace("`", "")
        clear = row["shown"] in ("better", "worse")
        shown.append(Difference(title, label, row["profile"], clear, row["points"]))
    title = "Mean budgets, and data sets never seen"
    for profile, mean in numbers["means"].items():
        points = mean["points"]
        clear = excludes_0(points)
        shown.append(Difference(title, "mean_budget − static mix", profile, clear, points))
    for row in numbers["unseen"]:
        label = f"{row['left_out']}, never seen − budget-aware static"
        clear = excludes_0(row["points"])
        shown.append(Difference(title, label, "calibrated", clear, row["points"]))
    title = "Choosing demonstrations"
    for experiment, selector in numbers["selectors"].items():
        for policy in selector["accuracy"]:
            against = against_of(selector, policy)
            for row in selector["gains"]:
                if (row["policy"], row["against"]) == (policy, against):
                    label = f"{policy} − {against}".replace("_", " ")
                    clear = excludes_0(row["points"])
                    part = f"{title}. {SELECTORS[experiment]}"
                    # what several experiments share stands in the first of them
                    if not any((d.label, d.points) == (label, row["points"]) for d in shown):
                        shown.append(Difference(part, label, "beams", clear, row["points"]))
    return shown


WIDTH, LABELS, ROW, MARGIN, TOP = 860, 340, 14, 20, 74
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30)
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; fill: #111 }
.back { fill: #fff } .grid { stroke: #e3e3e3 } .zero { stroke: #888 }
.a { stroke: #1f64ad; --c: #1f64ad } .b { stroke: #c05215; --c: #c05215 }
.c { stroke: #2b7a3d; --c: #2b7a3d }
.d { stroke: #7a3d9e; --c: #7a3d9e } .e { stroke: #8a6d00; --c: #8a6d00 }
.open { fill: #fff } .full { fill: var(--c) } .line { stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #ccc } .title { fill: #fff } .back, .open { fill: #1e2129 }
  .grid { stroke: #363a45 } .zero { stroke: #999 }
  .a { stroke: #7db8f5; --c: #7db8f5 } .b { stroke: #f3a26d; --c: #f3a26d }
  .c { stroke: #7fcf92; --c: #7fcf92 }
  .d { stroke: #c79be8; --c: #c79be8 } .e { stroke: #d9c36a; --c: #d9c36a }
}
"""


def across(points: float) -> float:
    """The place on the axis, which is linear near 0 and logarithmic far from it."""
    half = (WIDTH - LABELS - MARGIN) / 2
    return LABELS + half * (1 + math.asinh(points) / math.asinh(45))


def drawing(every: list[Difference]) -> str:
    """The plot as SVG, with colours for light and dark pages."""
    rows: dict[tuple[str, str], list[Difference]] = {}
    for each in every:
        rows.setdefault((each.section, each.label), []).append(each)
    parts, y, section = list[str](), TOP, ""
    for (title, label), shared in rows.items():
        if title != section:
            y, section = y + ROW + 6, title
            parts.append(f'<text class="title" x="8" y="{y}">{escape(title)}</text>')
        y += ROW
        parts.append(f'<text x="18" y="{y}">{escape(label)}</text>')
        parts += [
            marker(each, y - 4 + 4 * index - 2 * (len(shared) - 1))
            for index, each in enumerate(shared)
        ]
    height = y + 34
    for tick in TICKS:
        x, line = across(tick), "grid" if tick else "zero"
        parts.insert(
            0, f'<line class="{line}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 26}"/>'
        )
        number = f"{tick:+d}".replace("-", "−") if tick else "0"
        parts += [
            f'<text x="{x:.1f}" y="{at}" text-anchor="middle">{number}</text>'
            for at in (TOP - 6, height - 12)
        ]
    for index, words in enumerate(KINDS.values()):
        x = 18 + 130 * index
        parts.append(
            f'<circle class="{"adbec"[index]} full" cx="{x}" cy="40" r="3.5"/><text x="{x + 8}" '
            f'y="44">{words}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" '
        'role="img"><title>Differences in points, with 95 % '
        f"intervals</title><style>{STYLE}</style>"
        f'<rect class="back" width="{WIDTH}" height="{height}"/>'
        '<text class="title" x="8" y="20">Differences in points, with 95 % intervals; filled: '
        "better or worse after "
        "correction, open: no measurable difference</text>" + "\n".join(parts) + "</svg>\n"
    )


def marker(each: Difference, y: float) -> str:
    """A dot with its interval."""
    (x, low, high), kind = (
        (across(number) for number in each.points),
        "adbec"[list(KINDS).index(each.kind)],
    )
    return (
        f'<line class="line {kind}" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle class="{kind} {"full" if each.shown else "open"}" cx="{x:.1f}" cy="{y}" r="3"/>'
    )


def write(numbers: Numbers) -> None:
    """Write the tables into the page, and the chart."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(numbers)}\n{END}{after}", encoding="utf-8")
    CHART.write_text(drawing(differences(numbers)), encoding="utf-8")


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        collected = collect(*map(Path, folders))
        KEPT.write_text(json.dumps(collected, indent=1) + "\n", encoding="utf-8")
    write(json.loads(KEPT.read_text(encoding="utf-8")))
    print(f"written: {PAGE}, {CHART}")
