"""Show the results of a finished run: in sentences, on the terminal and as `report.html`.

A report is made from the files in the run's folder alone (`results.json`, `metrics.csv`,
`config.yaml`), so it can be written again at any time. This module puts together the page; its
sentences, tables and charts are made in the modules beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from knobwise.common.progress import duration
from knobwise.envs.tables.units import TIMES
from knobwise.experiments.evidence.results import (
    baselines,
    differences_at,
    known,
    read_results,
    rows_at,
    unit_of,
)
from knobwise.experiments.evidence.schema import RunFacts, RunResults, SingleDecision
from knobwise.experiments.evidence.task import (
    ACCURACY,
    DEADLINE,
    DECISION,
    DEMONSTRATIONS,
    FEASIBLE,
    Row,
    shown_at,
    task_of,
)
from knobwise.experiments.report import charts, tables
from knobwise.experiments.report.page import Figure, render_page, unchecked
from knobwise.experiments.report.result_charts import difficulty, result_charts
from knobwise.experiments.report.result_charts import result_images as result_images
from knobwise.experiments.report.tables import (
    Folded,
    Tile,
    gain_tile,
    print_lines,
    print_sections,
    print_table,
    reworded,
    table_of,
)
from knobwise.experiments.report.training_charts import training
from knobwise.experiments.wording import words
from knobwise.experiments.wording.choice_sentences import (
    on_difficulty,
    on_tree,
    on_usage,
    rule_condition,
    setting,
)
from knobwise.experiments.wording.sentences import verdict as verdict
from knobwise.experiments.wording.words import number, policy_name, quantity, shots_words


@unchecked
def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run and return its path.

    Raises:
        InputError: there is no `results.json`, or it does not hold the results of a run.
    """
    folder = Path(run_folder).resolve()
    results = read_results(folder)
    figures = {heading: [figure] for heading, figure in result_charts(results).items()}
    # what training added is said in its own section
    of_training = training(results, folder / "metrics.csv")
    lead, *sentences = verdict(results)
    others = [line for line in sentences if line not in of_training]
    # the first figure comes before the sentences
    first = next(iter(figures), "")
    sections = {first: figures.pop(first, []), "What the run shows": [others]}
    sections |= figures | _on_datasets(results) | explanation(results)
    sections |= {"Training": of_training, "Guarantees": _guarantees(results)}
    sections |= {"Warnings about the profile": [results.get("warnings") or []]}
    sections |= {"Tables": _tables(results), "How to reproduce": _how_to_reproduce(results, folder)}
    unit = unit_of(results)
    return render_page(
        folder / "report.html",
        "knobwise run report",
        f"{folder.parent.name} / {folder.name}",
        reworded(sections, unit),
        facts=[_when(results.get("run")), _facts(results)],
        tiles=reworded(_tiles(results), unit),
        lead=lead,
    )


def print_results(results: RunResults, console: Console) -> None:
    """Print the results as a table, and the verdict; without colours and frames if this is no
    terminal."""
    print_table(console, tables.policies(results))
    if results.get("by_dataset"):
        print_table(console, tables.by_dataset(results))
    print_lines(console, verdict(results))


# -- the head of the page --------------------------------------------------------------------------


def _when(run: RunFacts | None) -> str:
    """Say when the run was made, how long it took and with which code; "" if that is not known."""
    if not run:
        return ""
    commit, _, dirty = (run["commit"] or "unknown").partition("-")
    code = f"{commit[:9]}-{dirty}".removesuffix("-")
    return f"{run['started']} UTC · took {duration(run['seconds'])} · commit {code}"


def _facts(results: RunResults) -> str:
    """Say what the run was trained and judged on."""
    profile = {"samples": 0, "candidates": 0, **results.get("profile", {})}
    name = profile.get("name", "unnamed")
    seeds = f"seeds {', '.join(map(str, results.get('seeds', [])))}"
    if not task_of(results).averaged:
        bank = ""
        if "test_candidates" in results:
            bank = f", with their own bank of {results['test_candidates']:,} candidates"
        return (
            f"trained on {name}: {profile['samples']:,} queries, {profile['candidates']:,} "
            f"candidates · judged on {results['test_queries']:,} held-out queries{bank} · {seeds} "
            f"· shots {', '.join(map(str, results['shots']))}, "
            f"trained with {results['trained_shots']}"
        )
    part = "split"
    if splits := results.get("split_seeds"):
        part = f"parts of {len(splits)} splits"
    judged = f"{number(results.get('test_samples'), ',.0f')} samples"
    if results.get("test_clusters"):
        judged += f" of {results['test_clusters']:,} groups"
    configurations = number(profile.get("configurations"), ",.0f")
    return (
        f"profile {name}: {profile['samples']:,} samples × {configurations} "
        f"configurations · judged on the {results.get('split', 'test')} {part} "
        f"({judged}) · {seeds} · budgets "
        f"{_budgets(results, task_of(results).conditions(results))}"
    )


def _budgets(results: RunResults, budgets: list[float]) -> str:
    return ", ".join(words.condition_words(results, budget) for budget in budgets)


def _tiles(results: RunResults) -> list[Tile]:
    """Return the numbers to be seen first, of the policy that stands for the run: what it gains,
    its share on time or accuracy, and the time of a decision."""
    task = task_of(results)
    policy = task.main_policy(results) or ""
    rows = rows_at(results, task.main_condition(results))
    row = rows.get(policy, {})
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
        value, _, detail = words.cell(row, metric).partition("\n")
        if metric is FEASIBLE:
            detail = f"{policy_name(against)}: {words.cell(rows.get(against, {}), metric)}"
        if metric.key in row:
            tiles.append(Tile(value, metric.name, detail))
    return tiles


# -- sections --------------------------------------------------------------------------------------

DATASETS = {
    "deadline": "The oracle gap is between the static configuration of all data sets and the "
    "oracle, within each data set.",
    "mean": "A budget limits the mean over all data sets; the policy decides how much of "
    "it to spend on each. Every policy is compared at what it spent on a data set: with the static "
    "mix of all data sets, the best single configuration and, for the gap, the oracle, each "
    "spending as much there.",
}
"""Kind of task → how policies are compared within a data set."""


def _on_datasets(results: RunResults) -> dict[str, list[Any]]:
    if not results.get("by_dataset"):
        return {}
    blocks: list[Any] = [
        f"Means over the budgets. {DATASETS[task_of(results).name]} Of the other baselines only "
        "the best of each data set is listed, selected on these very samples."
    ]
    if task_of(results) is DEADLINE:
        drawn = charts.by_dataset(results)
        blocks.append(Figure(drawn, "A dot is a mean utility, the line its 95% interval.", 2))
    return {"Data set by data set": [*blocks, Folded("The numbers", [tables.by_dataset(results)])]}


def explanation(results: RunResults) -> dict[str, list[Any]]:
    """Return the sections that explain how the deployed policy sets the knobs."""
    why = results.get("explanation")
    if not why:
        return {}
    unit = unit_of(results)
    seed = ""
    if results.get("best_seed") is not None and len(results["seeds"]) > 1:
        seed = f" (seed {results['best_seed']})"
    # where the guard fell back, no feature is read
    about = (
        f"The deployed policy{seed} on {why['samples']:,} test samples, its decisions free. It "
        f"reads the features at {_budgets(results, why['reads']) or 'no budget'}."
    )
    rules = [
        {
            "if": rule_condition(rule["when"], unit),
            "then": setting(rule["then"]),
            "share of decisions": f"{rule['share']:.0%}",
            "agreement": f"{rule['alike']:.0%}",
        }
        for rule in why["tree"]["rules"]
    ]
    hard = why["difficulty"]
    groups = [
        {
            "difficulty": quantity(group["difficulty_ms"], unit),
            "latency of the choice": quantity(group["policy_ms"], unit)
            + words.interval(group["ci95"], ".3g"),
            "of static": quantity(group["static_ms"], unit),
        }
        for group in hard["groups"]
    ]
    return {
        "Why these settings": [about, Folded("Settings by budget", [on_usage(results)])],
        "Easy and hard samples": [
            *on_difficulty(results),
            difficulty(hard, unit) if groups else "",
            Folded("The numbers", [table_of(groups)]) if groups else "",
        ],
        "Which features matter": _importance(results),
        "In a few rules": [on_tree(why["tree"]), table_of(rules, wordy=[0, 1])],
        "Single decisions": [
            _decisions("The decisions that gain most over static", why["best"], unit),
            _decisions("The decisions that lose most against static", why["worst"], unit),
        ],
    }


def print_explanation(results: RunResults, console: Console) -> None:
    """Print the sections on why the deployed policy sets the knobs as it does."""
    print_sections(console, reworded(explanation(results), unit_of(results)))


def _importance(results: RunResults) -> list[Any]:
    """Return what is lost without each block of features, or some of its columns."""
    score = "accuracy minus the price of the latency"
    if task_of(results) is DEADLINE:
        score = "utility"
    lines = []
    # a block of features, or one of its columns
    for row in results["explanation"]["importance"]:
        name = row["name"]
        if isinstance(row["column"], str):
            name = row["column"]
        elif row["column"] is not None:
            name += f" [{row['column']}]"
        # a loss has no plus sign; its interval stands below it
        loss = words.points(row["lost"], ".1f") + words.span(row["ci95"]).replace(" ", "\n", 1)
        lines.append({"features": name, "lost": loss})
    if not lines:
        return []
    about = (
        f"Loss of {score} (points, mean over budgets) when a feature is shuffled between samples."
    )
    return [about, table_of(lines)]


def _decisions(title: str, decisions: list[SingleDecision], unit: str) -> Folded | None:
    """Return single decisions of the policy beside those of static, folded; None without any."""
    lines = []
    for row in decisions:
        line = {"sample": f"{row['question'] or ''}\n{row['dataset']}, {row['sample_id']}"}
        line["budget"] = quantity(row["budget_ms"], unit)
        for name in ("policy", "static"):
            side = row[name]
            outcome = f"{number(side['accuracy'], '.2f')} accurate"
            latency = quantity(side["latency_ms"], unit)
            line[name] = f"{setting(side['configuration'])}\n{outcome}, {latency}"
        lines.append(line | {"gain": f"{row['gain']:+.2f}"})
    if not lines:
        return None
    return Folded(title, [table_of(lines, wordy=[0, 2, 3])])


def _guarantees(results: RunResults) -> list[Any]:
    """Return what the guard decided, and how."""
    table = tables.guarantees(results)
    if not table.rows:
        return []
    return [
        "The guard checks each budget on held-out samples, from which these numbers are; one line "
        "per seed. Static, or the static mix, decides where the policy shows no gain over it. To "
        "be on time often enough, the policy plans with a part of the budget, the margin, unless "
        "that would cost too much utility.",
        table,
    ]


# -- tables ----------------------------------------------------------------------------------------

GLOSSARY = {
    "deadline": {
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
        "brackets": "95% bootstrap interval over the test samples (or the groups that they belong "
        "to), and over the seeds if there are several",
        "baselines that predict": "are fitted once, or once on each split: their settings are "
        "chosen with one division into folds, and with another one their numbers may differ",
        "decision time": "of the learned controller: median time of one decision for one request, "
        "by NumPy, in the quickest of three rounds, right after a small transformer has run: in "
        "front of a model caches are cold",
    },
    "mean": {
        "mean budget": "the limit on the average latency over all requests; easy requests pay for "
        "hard ones",
        "over static mix, over best single": "difference in accuracy to that policy at equal mean "
        "latency: at what the policy spent on the test samples, which is not exactly its budget",
        "oracle gap closed": "(policy − static mix) / (oracle − static mix), in accuracy, all at "
        "equal mean latency",
        "price": "λ: how much accuracy a unit of latency must bring; 1/λ is what a right answer is "
        "worth. The learned controller reads this worth, the others that see the input take "
        "argmax Â − λ·L̂",
        "brackets": "95% bootstrap interval over the test samples (or their groups) and seeds; "
        "intervals of differences are paired",
    },
    "selector": {
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
"""Kind of task → the terms of its tables and their meanings."""
NOT_CHARGED = {
    "utility": "the accuracy of an answer that is on time, 0 for one that is late; what policies "
    "are judged on. No policy is charged for its decisions, which take time and have no price here"
}
"""The terms that have another meaning where budgets are no times."""


def _glossary(results: RunResults) -> Folded:
    """Return the terms, and every policy in the tables."""
    task = task_of(results)
    terms = dict(GLOSSARY[task.name])
    if unit_of(results) not in TIMES:
        terms |= NOT_CHARGED
        terms.pop("if free", None)
    if "split_seeds" in results:
        terms["brackets"] += " and the splits; a sample that several splits test counts as one"
    # only policies of the project have a description
    for row in task.rows(results):
        if about := words.POLICIES.get(row["policy"]):
            name = policy_name(row["policy"], results)
            terms[name] = about["description"].format(hidden=words.hidden_words(results))
    return Folded("What the words mean", [terms])


def _tables(results: RunResults) -> list[Any]:
    """Return the tables of all policies, folded."""
    task = task_of(results)
    policies = [tables.policies(results), _glossary(results)]
    if task is DEMONSTRATIONS:
        return [Folded("Every policy, by the number of demonstrations", policies)] + [
            Folded(title, blocks)
            for title, blocks in _comparisons(results).items()
            if blocks[-1].rows
        ]
    folded = [
        Folded("Every policy, means over the budgets", policies),
        Folded("Every policy, budget by budget", [tables.by_condition(results)]),
    ]
    if chosen := results.get("chosen"):
        iterations = ", ".join(f"{seed['iteration']:,}" for seed in chosen)
        seeds = ", ".join(map(str, results.get("seeds", range(len(chosen)))))
        text = f"The network of iteration {iterations} (seeds {seeds})."
        # a network alone has no weights to show
        weights = [table for table in [tables.chosen(results)] if table.rows]
        if weights:
            text += " In its teacher the network and the experts have these weights."
        folded.append(Folded("What was chosen on held-out samples", [text, *weights]))
    return folded


def _comparisons(results: RunResults) -> dict[str, list[Any]]:
    """Return the further tables of selectors, which may be empty: title → sentence and table."""
    calls = [
        {
            "policy": policy_name(row["policy"], results),
            "true calls": f"{sum(row['calls']) / len(row['calls']):,.0f}",
        }
        for row in results.get("true_calls", [])
    ]
    return {
        "Differences": [
            "In points, on the same queries and seed by seed; the last column says what the "
            f"interval shows with {shots_words(shown_at(results))}.",
            tables.differences(results),
        ],
        "Without the model": [
            "The answer that the chosen demonstrations give themselves, by majority for each part "
            "of the question: how much of the accuracy comes from choosing, not from the model.",
            tables.by_condition(results, "votes"),
        ],
        "Controls": [
            "They should gain nothing: GRPO on rewards shuffled within each group, and selectors "
            f"that do not see the {words.hidden_words(results)}.",
            tables.by_condition(results, "controls"),
        ],
        "True calls": [
            "Sequences of training queries that the answering model answered during GRPO, mean "
            "over the seeds; recorded ones that a reward was learned from, and those of "
            "validation, are not among them.",
            table_of(calls),
        ],
    }


def _how_to_reproduce(results: RunResults, folder: Path) -> list[Any]:
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
