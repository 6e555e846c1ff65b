"""What a promise keeps and costs on tables of different shape: policy, static under the same
promise, and the policy that promises nothing.

For each table and three splits, `policy=auto` is trained on all fitted samples, as by default, and
once more with a fifth of them held back, on which a promise of .9, .95 and .99 is calibrated at
each default budget. Shares on time are of test samples, with exact 95 % intervals, decisions for
free.

`penalties` asks whether training should know of the promise: GRPO alone, with what a late answer
costs in its reward (a Lagrange multiplier, λ), with the formula of the original controller (gamma =
10), and with the λ of each budget whose expected accuracy is highest after the test, which favours
it.

    python experiments/studies/promise_tables.py run RUNS TABLE …
    python experiments/studies/promise_tables.py table RUNS
    python experiments/studies/promise_tables.py penalties TABLE …

Tables are named as for `grpo_alone.py`. What is finished is kept, so a stopped command goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.promise import HELD_BACK, late, requests_of
from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.evaluation.own_cost import OwnCost
from knobwise.agents.evaluation.policy import choices_of, inputs_of_rows, reads_features
from knobwise.agents.problem import Problem
from knobwise.agents.training.controllers import ControllerSetup, controller_trainer
from knobwise.common.files import write_text
from knobwise.envs.bandit.settings import RewardConfig
from knobwise.envs.tables.divisions import hold_back
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.evaluate import Deadlines
from knobwise.experiments.evidence.promises import exact_interval, promises_on_test
from knobwise.experiments.evidence.schema import PromiseFacts
from knobwise.experiments.settings.choices import (
    AUTO,
    COLD_OPTIMISER,
    DISTILLED_OPTIMISER,
    GRPO,
    SAMPLED,
)
from knobwise.experiments.studies.grpo_alone import SHARES, SPLITS, table_named
from knobwise.experiments.train.controller import width_for

Rows = list[PromiseFacts]
PROMISES = (0.9, 0.95, 0.99)
PENALTIES: dict[str, RewardConfig] = {
    "λ = 0": RewardConfig(kind="utility", miss=0.0),
    "λ = 0.3": RewardConfig(kind="utility", miss=0.3),
    "λ = 1": RewardConfig(kind="utility", miss=1.0),
    "λ = 3": RewardConfig(kind="utility", miss=3.0),
    "gamma = 10": RewardConfig(kind="shaped"),
}
"""What a late answer costs in training, by its name."""
TODAY = "no promise"


def problems_of(table: ProfileTable, number: int) -> tuple[Problem, Problem]:
    """Return the problem of a split with all fitted samples, and with a part held back."""
    split = table.split(*SHARES, number)
    part, held = hold_back(table, split, HELD_BACK, number)
    return Problem.from_table(table, split), replace(
        Problem.from_table(table, part), calibration=held
    )


def taught(problem: Problem, budgets_ms: Tensor) -> ControllerSetup:
    """Train `policy=auto`, and return its setup with the weights that are kept."""
    policy = replace(AUTO, hidden=width_for(problem, budgets_ms, AUTO))
    trainer = distillation_trainer(
        problem, policy=policy, loss=SAMPLED, optimiser=DISTILLED_OPTIMISER, budgets_ms=budgets_ms
    )
    trainer.run()
    trainer.agent.load_state_dict(trainer.state.best.state)
    return trainer.setup


def rows_of(setup: ControllerSetup, promise: float, budgets_ms: Tensor) -> list[PromiseFacts]:
    """Calibrate a promise, and return what comes of it on the test samples."""
    setup.policy = replace(setup.policy, promise=promise)
    controller = calibrate_controller(setup, budgets_ms)
    free = torch.zeros(len(budgets_ms), dtype=torch.float64)
    evaluator = Deadlines(setup.problem, budgets_ms)
    return promises_on_test(evaluator, [controller], [0], {0: OwnCost(free, free)})


def unpromised(setup: ControllerSetup, budgets_ms: Tensor) -> list[PromiseFacts]:
    """Return the same of the controller that promises nothing, with its guard."""
    problem = setup.problem
    decider = calibrate_controller(setup, budgets_ms).decider
    requests = requests_of(problem, problem.split.test)
    features, mask = inputs_of_rows(problem, requests.rows)
    rows: list[PromiseFacts] = []
    for budget in budgets_ms.tolist():
        limit = np.array([budget])
        chosen = choices_of(decider, features, limit, mask)
        # where its guard lets static decide, no features are waited for
        reads = torch.from_numpy(reads_features(decider, limit))
        too_late = late(problem, requests, chosen, budget, reads)
        hits, count = int((~too_late).sum()), len(requests.rows)
        accuracy = problem.values.accuracy[requests.rows, chosen[:, 0]].double()
        facts: PromiseFacts = {
            "policy": TODAY,
            "budget_ms": budget,
            "test": hits / count,
            "test_ci95": exact_interval(hits, count),
            "accuracy": float(accuracy.nan_to_num().mean()),
        }
        rows.append(facts)
    return rows


def run(folder: Path, names: Sequence[str]) -> None:
    """Train what is missing of each table and split."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(SPLITS):
        for name in names:
            whole, part = problems_of(table_named(name), number)
            budgets_ms = whole.budgets(None)

            def promised(part: Problem = part, budgets_ms: Tensor = budgets_ms) -> Rows:
                setup = taught(part, budgets_ms)
                rows = [rows_of(setup, promise, budgets_ms) for promise in PROMISES]
                return [row for each in rows for row in each]

            def today(whole: Problem = whole, budgets_ms: Tensor = budgets_ms) -> Rows:
                return unpromised(taught(whole, budgets_ms), budgets_ms)

            for kind, train in (("promised", promised), ("today", today)):
                path = folder / f"{Path(name).stem}_{number}_{kind}.json"
                if not path.exists():
                    write_text(path, json.dumps(train()))
                    print(path, flush=True)


def print_table(folder: Path) -> None:
    """Print a row for each table, budget and promise, the splits in one cell; then how many
    promises were broken."""
    tables: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*_promised.json")):
        other = path.with_name(path.name.replace("promised", "today"))
        if other.exists():
            rows = json.loads(path.read_text()) + json.loads(other.read_text())
            tables.setdefault(path.stem.rsplit("_", 2)[0], []).append(rows)
    heads = ["table", "budget", "promise", "policy: kept", "held-out bound", "on test", "accuracy"]
    heads += ["static: kept", "on test", "accuracy", f"{TODAY}: on test", "accuracy"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    made = broken = nothing = spurned = 0
    summary: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for name, splits in tables.items():
        for promise in PROMISES:
            for place in range(len([row for row in splits[0] if row["policy"] == TODAY])):
                cells = [_at(rows, promise, place) for rows in splits]
                ours = [each["controller"] for each in cells]
                static = [each["static_under_promise"] for each in cells]
                today = [each[TODAY] for each in cells]
                summary.setdefault((name, promise), []).extend(cells)
                made += sum(row["kept"] for row in ours)
                nothing += sum(not row["kept"] for row in ours)
                broken += sum(row["broken"] for row in ours)
                pairs = zip(ours, static, strict=True)
                spurned += sum(not row["kept"] and single["kept"] for row, single in pairs)
                words = [name.replace("_", " "), f"{today[0]['budget_ms']:.4g}", f"{promise:g}"]
                words += [_kept(ours), _each(ours, "held_out_bound"), _test(ours)]
                words += [_each(ours, "accuracy", 3), _kept(static), _test(static)]
                words += [_each(static, "accuracy", 3), _test(today), _each(today, "accuracy", 3)]
                print(f"| {' | '.join(words)} |")
    print(
        f"\n{made} promises on test samples, {broken} broken; {nothing} times none was made, "
        f"{spurned} of these although a single configuration passes"
    )
    print_summary(summary)


def print_summary(cells: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]]) -> None:
    """Print a row for each table and promise: how many were made, at how many budgets of how many
    splits, and means over those of the share on time and the accuracy on test samples."""
    policies = {"policy": "controller", "static": "static_under_promise", TODAY: TODAY}
    heads = ["table", "promise", "made", *(f"{name}: on time, accuracy" for name in policies)]
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for (name, promise), all_cells in cells.items():
        made = [each for each in all_cells if each["controller"]["kept"]]
        words = [name.replace("_", " "), f"{promise:g}", f"{len(made)} of {len(all_cells)}"]
        for policy in policies.values():
            shares = [each[policy]["test"] for each in made]
            accuracies = [each[policy]["accuracy"] for each in made]
            mean = f"{100 * np.mean(shares):.1f} %, {np.mean(accuracies):.3f}" if made else "–"
            words.append(mean)
        print(f"| {' | '.join(words)} |")


def _at(rows: Sequence[Mapping[str, Any]], promise: float, place: int) -> dict[str, Any]:
    """Return the rows of the three policies at a budget, by policy."""
    by_policy: dict[str, list[Any]] = {}
    for row in rows:
        if row.get("promise", promise) == promise:
            by_policy.setdefault(row["policy"], []).append(row)
    return {policy: of_policy[place] for policy, of_policy in by_policy.items()}


def _kept(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(row['kept'] for row in rows)} of {len(rows)}"


def _each(rows: Sequence[Mapping[str, Any]], key: str, digits: int = 1) -> str:
    """Write the mean over splits, or for shares each."""
    if digits == 3:
        return f"{np.mean([row[key] for row in rows]):.3f}"
    return ", ".join(f"{100 * row[key]:.1f}" for row in rows)


def _test(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for row in rows:
        low, high = (100 * end for end in row["test_ci95"])
        parts.append(f"{100 * row['test']:.1f} [{low:.1f}, {high:.1f}]")
    return "; ".join(parts)


# -- what training is to know of it ----------------------------------------------------------------


def print_penalties(names: Sequence[str]) -> None:
    """Print accuracy under the promise by what a late answer costs in training, a row for each
    table and promise: means over splits and the budgets at which every way keeps it."""
    heads = [*PENALTIES, "λ by budget", "static"]
    print(f"| table | promise | budgets | {' | '.join(heads)} |\n{'|---' * (len(heads) + 3)}|")
    for name in names:
        table = table_named(name)
        ways: dict[str, list[list[PromiseFacts]]] = {promise: [] for promise in PENALTIES}
        for number in range(SPLITS):
            _, problem = problems_of(table, number)
            budgets_ms = problem.budgets(None)
            for way, reward in PENALTIES.items():
                trainer = controller_trainer(
                    problem,
                    policy=GRPO,
                    loss=SAMPLED,
                    optimiser=COLD_OPTIMISER,
                    reward=reward,
                    budgets_ms=budgets_ms,
                )
                trainer.run()
                trainer.agent.load_state_dict(trainer.state.best.state)
                rows = [rows_of(trainer.setup, promise, budgets_ms) for promise in PROMISES]
                ways[way].append([row for each in rows for row in each])
                print(f"{name} {number} {way}", file=sys.stderr, flush=True)
        for promise in PROMISES:
            print(_penalty_row(name, promise, ways))


def _penalty_row(name: str, promise: float, ways: Mapping[str, Any]) -> str:
    """Return the row of a table and a promise."""

    def rows_by(way: str, policy: str) -> list[PromiseFacts]:
        return [
            row
            for rows in ways[way]
            for row in rows
            if row["policy"] == policy and row["promise"] == promise
        ]

    by_way = {way: rows_by(way, "controller") for way in PENALTIES}
    static = rows_by("λ = 0", "static_under_promise")
    everyone = [*by_way.values(), static]
    places = [i for i in range(len(static)) if all(rows[i]["kept"] for rows in everyone)]
    multipliers = [rows for way, rows in by_way.items() if way.startswith("λ")]
    chosen = [max((rows[i] for rows in multipliers), key=_expected) for i in places]
    columns = [[rows[i] for i in places] for rows in by_way.values()]
    columns += [chosen, [static[i] for i in places]]
    cells = ["–"] * len(columns)
    if places:
        cells = [f"{np.mean([row['accuracy'] for row in each]):.3f}" for each in columns]
    total = len(static)
    title = Path(name).stem.replace("_", " ")
    return f"| {title} | {promise:g} | {len(places)} of {total} | {' | '.join(cells)} |"


def _expected(row: PromiseFacts) -> float:
    return row["expected_accuracy"]


def main(words: list[str]) -> None:
    """Run a command, see the top."""
    torch.set_num_threads(1)
    match words:
        case ["run", folder, *names] if names:
            run(Path(folder), names)
        case ["table", folder]:
            print_table(Path(folder))
        case ["penalties", *names] if names:
            print_penalties(names)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
