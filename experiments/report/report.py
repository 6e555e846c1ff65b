"""Show the results of a finished run: in sentences, on the terminal and as `report.html`.

A report is made from the files in the run's folder alone (`results.json`, `metrics.csv`,
`config.yaml`), so it can be written again at any time. This module puts together the page; its
sentences, tables and charts are made in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from knobwise.common.progress import duration
from knobwise.experiments.report import charts, tables, words
from knobwise.experiments.report.page import Figure, Folded, render_page
from knobwise.experiments.report.result_charts import difficulty, result_charts
from knobwise.experiments.report.result_charts import result_images as result_images
from knobwise.experiments.report.sentences import (
    baselines,
    condition,
    feature_name,
    on_difficulty,
    on_tree,
    setting,
)
from knobwise.experiments.report.sentences import verdict as verdict
from knobwise.experiments.report.tables import Table, print_lines, print_table
from knobwise.experiments.report.training_charts import training
from knobwise.experiments.report.words import (
    LEARNED,
    STATIC,
    number,
    points,
    policy_name,
    quantity,
    shots_words,
)
from knobwise.experiments.results.problem import (
    DEADLINE,
    DEMONSTRATIONS,
    MEAN_BUDGET,
    problem_of,
    shown_at,
)

if TYPE_CHECKING:
    from rich.console import Console

Results = Mapping[str, Any]
Tiles = list[tuple[str, str, str]]


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises:
        InputError: there is no `results.json`, or it does not hold the results of a run.
    """
    folder = Path(run_folder).resolve()
    results = words.read_results(folder)
    figures = {heading: [figure] for heading, figure in result_charts(results).items()}
    # what training added is said in its own section
    of_training = training(results, folder / "metrics.csv")
    lead, *sentences = verdict(results, guard=False)
    others = [line for line in sentences if line not in of_training]
    # the first figure comes before the sentences
    first = next(iter(figures), "")
    sections = {first: figures.pop(first, []), "What the run shows": [others]}
    sections |= figures | _on_datasets(results) | _explanation(results)
    sections |= {"Training": of_training, "Guarantees": _guarantees(results)}
    sections |= {"Tables": _tables(results), "How to reproduce": _how_to_reproduce(results, folder)}
    return render_page(
        folder / "report.html",
        "knobwise run report",
        f"{folder.parent.name} / {folder.name}",
        sections,
        facts=[_when(results.get("run") or {}), _facts(results)],
        tiles=_selector_tiles(results) if "shots" in results else _tiles(results),
        lead=lead,
    )


def print_results(results: Results, console: Console) -> None:
    """Print the results as a table, and the verdict; without colours and frames if this is no
    terminal."""
    table = tables.policies(results)
    print_table(console, table.header, table.rows, tables.narrow(results), table.strong)
    if results.get("by_dataset"):
        table = tables.by_dataset(results)
        few = tables.NARROW_BY_DATASET[problem_of(results).name]
        print_table(console, table.header, table.rows, few, table.strong)
    print_lines(console, verdict(results))


def on_decisions(results: Results) -> str:
    """Compare in a sentence the time of a decision with the latency. Reading features and setting
    knobs do not count, because only a live run measures them. Empty if the time is not known, or if
    the budget limits no time."""
    learned = words.means_of(results).get(LEARNED, {})
    micros = float(learned.get("decision_us_p50") or 0)
    mean = float(learned.get("latency_ms_mean") or 0)
    if words.unit_of(results) != "ms" or not micros > 0 or not mean > 0:
        return ""
    share = micros / 1e3 / mean
    return f"A decision takes {quantity(micros, 'µs')}, {share:.1%} of the mean latency."


# -- the head of the page --------------------------------------------------------------------------


def _when(run: Mapping[str, Any]) -> str:
    """Say when the run was made, how long it took and with which code; "" if that is not known."""
    if not run:
        return ""
    commit = run["commit"] or ""
    dirty = "-dirty" if "dirty" in commit else ""
    code = f" · commit {commit[:9]}{dirty}" if commit else ""
    return f"{run['started']} UTC · took {duration(run['seconds'])}{code}"


def _facts(results: Results) -> str:
    """Say what the run was trained and judged on."""
    profile = results.get("profile", {})
    name = profile.get("name", "unnamed")
    seeds = f"seeds {', '.join(map(str, results.get('seeds', [])))}"
    if not problem_of(results).averaged:
        bank = ""
        if "test_candidates" in results:
            bank = f", with their own bank of {results['test_candidates']:,} candidates"
        return (
            f"trained on {name}: {profile.get('samples', 0):,} queries, "
            f"{profile.get('candidates', 0):,} candidates · judged on {results['test_queries']:,} "
            f"held-out queries{bank} · {seeds} · shots {', '.join(map(str, results['shots']))}, "
            f"trained with {results['trained_shots']}"
        )
    splits = len(results.get("split_seeds", []))
    part = f"parts of {splits} splits" if splits else "split"
    budgets = problem_of(results).judged_at(results)
    return (
        f"profile {name}: {profile.get('samples', '?')} samples × "
        f"{profile.get('configurations', '?')} configurations · judged on the "
        f"{results.get('split', 'test')} {part} ({results.get('test_samples', '?')} samples) · "
        f"{seeds} · budgets {_budgets(results, budgets)}"
    )


def _budgets(results: Results, budgets: list[float]) -> str:
    return ", ".join(quantity(budget, words.unit_of(results)) for budget in budgets)


def _tiles(results: Results) -> Tiles:
    """Return the numbers of a controller to be seen first."""
    means = words.means_of(results)
    learned = means.get(LEARNED)
    static = means.get(STATIC)
    if not learned or not (static or problem_of(results).equal_latency):
        return []
    # under mean budgets
    if not static:
        latency = quantity(learned["latency_ms_mean"], words.unit_of(results))
        tiles = [
            _gap(
                learned, "over_static_mix", "of accuracy over the static mix of equal mean latency"
            ),
            (number(learned["accuracy"], ".1%"), "accuracy", f"{latency} mean latency"),
        ]
        return [*tiles, *_decision_tile(results, learned)]
    on_time = [number(row.get("satisfaction_feasible"), ".1%") for row in (learned, static)]
    # the interval is of the paired difference
    gain = dict(learned) | {"over_static": words.value_of(learned) - words.value_of(static)}
    tiles = [
        _gap(gain, "over_static", "of utility against budget-aware static"),
        (on_time[0], "on time, where that is possible", f"budget-aware static: {on_time[1]}"),
    ]
    added = results.get("grpo_gain") or {}
    if "test" in added:
        method = (results.get("training") or {}).get("method", "GRPO")
        bounds = " to ".join(map(words.hundredths, added["test_ci95"]))
        gained = f"{words.hundredths(added['test'], '+.2f')} points"
        tiles.append((gained, f"of utility added by {method}", f"95% interval {bounds}"))
    return [*tiles, *_decision_tile(results, learned)]


def _gap(row: words.Row, key: str, meaning: str) -> tuple[str, str, str]:
    """Return the tile of a difference, in points, with its interval."""
    return f"{points(row[key])} points", meaning, words.span(row.get(f"{key}_ci95")).strip(" ()")


def _decision_tile(results: Results, row: words.Row) -> Tiles:
    micros = row.get("decision_us_p50")
    mean = row.get("latency_ms_mean")
    if not words.known(micros):
        return []
    share = ""
    if words.unit_of(results) == "ms" and mean:
        share = number(micros / 1000 / mean, ".1%", " of the mean latency")
    return [(quantity(micros, "µs"), "for a decision", share)]


def _selector_tiles(results: Results) -> Tiles:
    """Return the numbers of a selector to be seen first."""
    best = DEMONSTRATIONS.main_policy(results) or ""
    shots = shown_at(results)
    row = words.rows_at(results, shots).get(best)
    if not row:
        return []
    interval = words.span(row.get("accuracy_ci95"), ".1%").strip(" ()")
    meaning = f"of the answers are right, with {policy_name(best, results)}"
    tiles = [(number(row["accuracy"], ".1%"), meaning, interval)]
    over = words.differences_at(results, shots)
    # the strongest simple baseline, and where training began
    for name in (*baselines(results)[:1], "sft"):
        if gap := over.get((best, name)):
            against = f"against {policy_name(name, results)}"
            tiles.append(_gap({"gap": gap["difference"], "gap_ci95": gap["ci95"]}, "gap", against))
    return [*tiles, *_decision_tile(results, row)]


# -- sections --------------------------------------------------------------------------------------

DATASETS = {
    DEADLINE.name: "The oracle gap is between the static configuration of all data sets and the "
    "oracle, within each data set.",
    MEAN_BUDGET.name: "A budget limits the mean over all data sets; the policy decides how much of "
    "it to spend on each. Every policy is compared at what it spent on a data set: with the static "
    "mix of all data sets, the best single configuration and, for the gap, the oracle, each "
    "spending as much there.",
}
"""Kind of problem → how policies are compared within a data set."""


def _on_datasets(results: Results) -> dict[str, list[Any]]:
    if not results.get("by_dataset"):
        return {}
    blocks: list[Any] = [
        f"Means over the budgets. {DATASETS[problem_of(results).name]} Of the other baselines only "
        "the best one in each data set is shown, selected on these very samples."
    ]
    if problem_of(results) is DEADLINE:
        drawn = charts.by_dataset(results["by_dataset"])
        blocks.append(Figure(drawn, "A dot is a mean utility, the line its 95% interval.", 2))
    return {"Data set by data set": [*blocks, Folded("The numbers", [tables.by_dataset(results)])]}


def _explanation(results: Results) -> dict[str, list[Any]]:
    """Return the sections on why the deployed policy sets the knobs as it does."""
    why = results.get("explanation")
    if not why:
        return {}
    unit = words.unit_of(results)
    seed = ""
    if results.get("best_seed") is not None and len(results["seeds"]) > 1:
        seed = f" (seed {results['best_seed']})"
    about = (
        f"The deployed policy{seed} on {why['samples']:,} test samples, as if its decisions took "
        "no time."
    )
    # where the guard fell back, no feature is read
    if len(why["reads"]) < len(problem_of(results).judged_at(results)):
        reads = _budgets(results, why["reads"]) or "no budget"
        about += (
            f" It reads the features at {reads}; at the other budgets the guard decides without "
            "them."
        )
    hard = why["difficulty"]
    rules = []
    for rule in why["tree"]["rules"]:
        shares = [number(rule[key], ".0%") for key in ("share", "alike")]
        rules.append([condition(rule["when"], unit), setting(rule["then"]), *shares])
    header = ["if", "then", "share of decisions", "agreement"]
    return {
        "Why these settings": [about],
        "Easy and hard samples": [
            *on_difficulty(results),
            difficulty(hard, unit) if hard["groups"] else "",
            _correlations(hard, unit),
            "Spearman's rank correlation with difficulty, 95% intervals in brackets. In the last "
            "row every configuration counts with its mean latency over all samples, so that a "
            "sample that is slow under every configuration is not harder for that; a dash: all "
            "samples get the same setting.",
        ],
        "Which features matter": _importance(results),
        "In a few rules": [on_tree(why["tree"]), Table(header, rows=rules, wordy=[0, 1])],
        "Single decisions": [
            _decisions("The decisions that gain most over static", why["best"], unit),
            _decisions("The decisions that lose most against static", why["worst"], unit),
        ],
    }


def _correlations(hard: Mapping[str, Any], unit: str) -> Table:
    """Return the correlations with difficulty at each budget."""
    names = {
        "correlation": ("latency of the choice", "ci95"),
        "static": ("the same for static", ""),
        "setting": ("setting alone", "setting_ci95"),
    }
    rows = []
    for key, (name, interval) in names.items():
        values = []
        for row in hard["at"]:
            values.append(number(row[key], "+.2f") + words.interval(row.get(interval), "+.2f"))
        rows.append([name, *values])
    return Table(["budget", *(quantity(row["budget_ms"], unit) for row in hard["at"])], rows)


def _importance(results: Results) -> list[Any]:
    importance = results["explanation"]["importance"]
    if not importance:
        return []
    score = "accuracy minus the price of the latency"
    if problem_of(results) is DEADLINE:
        score = "utility"
    rows = []
    for row in importance:
        rows.append([feature_name(row), words.difference_cell(row["lost"], row["ci95"])])
    return [
        f"What is lost when each sample gets the features of another, in points of {score}, as a "
        "mean over the budgets.",
        Table(["features", "lost"], rows),
    ]


def _decisions(title: str, decisions: list[Mapping[str, Any]], unit: str) -> Folded | None:
    """Return single decisions of the policy beside those of static, folded; None without any."""
    rows = []
    for row in decisions:
        sides = []
        for side in (row["policy"], row["static"]):
            outcome = f"{number(side['accuracy'], '.2f')} accurate"
            latency = quantity(side["latency_ms"], unit)
            sides.append(f"{setting(side['configuration'])}\n{outcome}, {latency}")
        sample = f"{row['question'] or ''}\n{row['dataset']}, {row['sample_id']}"
        budget = quantity(row["budget_ms"], unit)
        rows.append([sample, budget, *sides, number(row["gain"], "+.2f")])
    header = ["sample", "budget", "policy", "static", "gain"]
    return Folded(title, [Table(header, rows, wordy=[0, 2, 3])]) if rows else None


def _guarantees(results: Results) -> list[Any]:
    table = tables.guarantees(results) if results.get("guard") else None
    if not table or not table.rows:
        return []
    if problem_of(results).equal_latency:
        return ["Decided on held-out samples; one line per seed.", table]
    text = (
        "Before a controller is deployed, each budget is checked on held-out samples, from which "
        "all these numbers are. Where it is not shown to gain anything over budget-aware static, "
        "static decides."
    )
    # only a guard with a level promises a share on time
    if len(table.header) > 3:
        level = table.header[-1].removesuffix(" on time")
        text += (
            f" Where {level} of the feasible requests can be answered on time without giving up "
            "much utility, the controller sees to it: it plans with a share of the budget, its "
            "margin."
        )
    return [text, table]


# -- tables ----------------------------------------------------------------------------------------

BY_BUDGET = {
    DEADLINE.name: "Utility with its interval; below it accuracy, mean latency and the share on "
    "time.",
    MEAN_BUDGET.name: "Accuracy with its interval; below it the mean latency spent, the difference "
    "to the static mix of equal mean latency, and the price.",
}
"""Kind of problem → what the cells of `tables.by_budget` hold."""
GLOSSARY = {
    DEADLINE.name: {
        "utility": "the accuracy of an answer that is on time, 0 for one that is late; what "
        "policies are judged on. The learned controller is charged its own cost: the time of its "
        "decision, and of the features if it reads them. All others are not charged, which favours "
        "them",
        "if free": "the utility that the learned controller would have if its decisions and "
        "features took no time",
        "oracle gap closed": "(policy − budget-aware static) / (oracle − budget-aware static), in "
        "utility; 100% is the oracle",
        "on time": "share of requests answered within their budget",
        "on time (feasible)": "the same, among the requests that at least one profiled "
        "configuration serves on time",
        "infeasible": "share of requests that no profiled configuration serves on time; every "
        "policy is late for them",
        "brackets": "95% bootstrap interval over the test samples, the seeds if there are several",
        "baselines that predict": "are fitted once, or once on each split: their settings are "
        "chosen with one division into folds, and with another one their numbers may differ",
        "decision time": "of the learned controller: median time of one decision for one request, "
        "by NumPy, in the quickest of three rounds, right after a small transformer has run: in "
        "front of a model caches are cold",
    },
    MEAN_BUDGET.name: {
        "mean budget": "the limit on the average latency over all requests; easy requests pay for "
        "hard ones",
        "over static mix, over best single": "difference in accuracy to that policy at equal mean "
        "latency: at what the policy spent on the test samples, which is not exactly its budget",
        "oracle gap closed": "(policy − static mix) / (oracle − static mix), in accuracy, all at "
        "equal mean latency",
        "price": "λ: how much accuracy a unit of latency must bring; 1/λ is what a right answer is "
        "worth. The learned controller reads this worth, the others that see the input take "
        "argmax Â − λ·L̂",
        "brackets": "95% bootstrap interval over the test samples and seeds; intervals of "
        "differences are paired",
    },
    DEMONSTRATIONS.name: {
        "accuracy": "share of held-out queries answered correctly with the demonstrations that a "
        "policy chose",
        "shots": "number of demonstrations shown; selectors are trained for one number and used "
        "with others too",
        "brackets": "95% bootstrap interval over the test queries, and over the seeds if there are "
        "several; that of a difference is paired: both policies on the same queries, seed by seed",
        "points": "hundredths of accuracy",
        "decision time": "median time of one choice, for one query, including the encoding of its "
        "pool, on one thread",
    },
}
"""Kind of problem → the terms of its tables and their meanings."""


def _glossary(results: Results) -> Folded:
    """Return the terms, and every policy in the tables."""
    problem = problem_of(results)
    terms = dict(GLOSSARY[problem.name])
    if "split_seeds" in results:
        terms["brackets"] += " and the splits; a sample that several splits test counts as one"
    hidden = words.listed(results.get("hidden") or ["information"])
    # only policies of the project have a description
    for row in problem.rows(results):
        if about := words.POLICIES.get(row["policy"]):
            name = policy_name(row["policy"], results)
            terms[name] = about["description"].format(hidden=hidden)
    return Folded("What the words mean", [terms])


def _tables(results: Results) -> list[Any]:
    """Return the tables of all policies, folded."""
    problem = problem_of(results)
    if not problem.averaged:
        return _selector_tables(results)
    blocks = [
        Folded(
            "Every policy, means over the budgets", [tables.policies(results), _glossary(results)]
        ),
        Folded(
            "Every policy, budget by budget", [BY_BUDGET[problem.name], tables.by_budget(results)]
        ),
    ]
    if chosen := results.get("chosen"):
        iterations = ", ".join(str(seed["iteration"]) for seed in chosen)
        seeds = ", ".join(map(str, results.get("seeds", range(len(chosen)))))
        text = f"The network of iteration {iterations} (seeds {seeds})."
        # a network alone has no weights to show
        weights = tables.chosen(results)
        if weights.rows:
            text += " In its teacher the network and the experts have these weights."
        blocks.append(
            Folded("What was chosen on held-out samples", [text, *[weights] * bool(weights.rows)])
        )
    return blocks


def _selector_tables(results: Results) -> list[Any]:
    """Return the tables of selectors: accuracies, differences, votes and controls."""
    trained = DEMONSTRATIONS.trained
    controls = DEMONSTRATIONS.controls
    shots = shots_words(shown_at(results))
    about = f"Share of held-out queries answered correctly; the best with {shots} come first."
    blocks = [
        Folded(
            "Every policy, by the number of demonstrations",
            [about, tables.policies(results), _glossary(results)],
        )
    ]
    between = tables.differences(results, trained, trained)
    if between.rows:
        simple = tables.differences(results, trained, baselines(results))
        about = (
            "In points, on the same queries and seed by seed; the last column says what the "
            f"interval shows with {shots}."
        )
        folded = Folded("Compared with the simple baselines", [simple])
        blocks.append(Folded("Differences", [about, between, folded]))
    if results.get("votes"):
        about = (
            "The answer that the chosen demonstrations give themselves, by majority for each part "
            "of the question: how much of the accuracy comes from choosing, and how much from the "
            "model."
        )
        blocks.append(Folded("Without the model", [about, tables.at_shots(results, "votes")]))
    if results.get("controls"):
        hidden = words.listed(results.get("hidden") or ["information"])
        about = (
            "They should gain nothing: GRPO on rewards shuffled within each group, and selectors "
            f"that do not see the {hidden}, compared with each other. Their differences, in "
            "points, are in the second table."
        )
        others = tables.differences(results, controls, (*trained, *controls))
        blocks.append(Folded("Controls", [about, tables.at_shots(results, "controls"), others]))
    return blocks


def _how_to_reproduce(results: Results, folder: Path) -> list[Any]:
    """Return the command, what repeats and what does not, and the settings of the run."""
    from knobwise import __version__

    command = results.get("command") or f"knobwise train experiment={folder.parent.name}"
    digest = (results.get("profile") or {}).get("digest", "unknown")
    text = (
        "<pre>{}</pre><p>knobwise {}; profile digest <code>{}</code>. The same profile, settings "
        "and seeds give the same numbers on the same kind of machine; decision times differ. For "
        "curves, run <code>tensorboard --logdir tensorboard</code> in the folder of the run; "
        "<code>wandb sync wandb/offline-run-*</code> sends what was logged offline to Weights "
        "&amp; Biases.</p>"
    )
    blocks: list[Any] = [Markup(text).format(command, __version__, digest)]
    config = folder / "config.yaml"
    if config.exists():
        settings = Markup("<pre>{}</pre>").format(config.read_text(encoding="utf-8"))
        blocks.append(Folded("The resolved configuration (config.yaml)", [settings]))
    return blocks
