"""Say why a controller decides as it does: for one sample of a profile, or what the decisions of a
run show."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from knobwise.agents.calibration.ways import WAYS
from knobwise.agents.deployed.controller import Drift
from knobwise.agents.evaluation.policy import Policy
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
from knobwise.common.files import write_json
from knobwise.common.json_text import decode_json
from knobwise.common.words import format_number, quantity, setting
from knobwise.envs.bandit.budgets import MIN_LATENCY_MS
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.units import check_time
from knobwise.experiments.deploy.evaluate import fitting_profile
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.report.choices import decision, print_explanation
from knobwise.experiments.report.tables import print_lines, print_table, table_of
from knobwise.experiments.settings.deployment_options import ExplainRun
from knobwise.experiments.settings.profiles import read_questions
from knobwise.serving.inputs import blocks_of
from knobwise.serving.knob_policy import KnobPolicy
from knobwise.serving.tracker import LatencyTracker

MAX_ROWS = 10
"""Number of configurations in the table of a decision."""
EXPECTED = ("probability", "utility", "accuracy", "latency_ms", "on_time")
"""What may be expected of each configuration; without a teacher it is the probability alone."""
MEASURED = ("accuracy", "latency_ms")
"""What was measured of each configuration, beside further costs, as `cost_usd`."""


def explain_run(config: ExplainRun) -> dict[str, object]:
    """Print an explanation, write it to `json` if that is set, and return it.

    Raises:
        InputError: no such run or sample, a run without an explanation, a budget that is not
            positive or, as a mean, not calibrated, the profile of another controller, the tracker
            of another controller.
    """
    if config.sample is None:
        explained = _of_run(config)
    else:
        explained = _of_sample(config, config.sample)
    write_json(config.json, explained)
    return explained


def _of_run(config: ExplainRun) -> dict[str, object]:
    """Explain what the decisions of a run show, from its results."""
    if config.budget_ms is not None or config.tracker is not None:
        raise InputError("budget_ms and tracker: explain one decision; say which with sample=ID")
    results = read_results(config.checkpoint)
    if "explanation" not in results:
        raise InputError(
            f"{config.checkpoint}: its results hold no explanation, as those of selectors; explain "
            "one decision of a controller with sample=ID budget_ms=MS"
        )
    print_explanation(results, Console())
    return {**results["explanation"], "knob_usage": results["knob_usage"]}


def _of_sample(config: ExplainRun, sample: str) -> dict[str, Any]:
    """Explain why a controller decides as it does for one sample, and add what was measured."""
    loaded = load_checkpoint(checkpoint_at(config.checkpoint), config.rule)
    policy = KnobPolicy(loaded)
    if config.budget_ms is None or not 0 < config.budget_ms < math.inf:
        raise InputError(
            f"budget_ms={config.budget_ms}: say how long the answer may take, or what it may cost, "
            f"a positive number of {policy.unit}"
        )
    table = fitting_profile(config, loaded)
    row = _row_of(table, sample)
    drift = _drift(config.tracker, policy)
    features = table.blocks(torch.tensor(row))
    # the range of budgets in which the explanation looks for another decision
    low, high = table.latency_ms[table.mask].clamp_min(MIN_LATENCY_MS).aminmax()
    between_ms = float(low), float(high)
    with warnings.catch_warnings():
        # what they say of limits is in the reason
        warnings.simplefilter("ignore", UserWarning)
        decided = policy.decide(
            features, config.budget_ms, explain=True, drift=drift, between_ms=between_ms
        )
        others = _other_choices(policy, table, row, config.budget_ms, drift)
    explained = asdict(decided) | {"sample": sample, "budget_ms": config.budget_ms} | others
    explained |= {"limits": policy.decider.limits.declared, "deadline": policy.agent.rule.late}
    mean = policy.decider.mean
    if mean is not None and mean.mix and not mean.reads_features(np.array([config.budget_ms]))[0]:
        # the mix treats all inputs alike, and its next turn says nothing of typical ones
        explained["typical"] = explained["typical"] and explained["decision"]
    explained["question"] = read_questions(config.profile).get(table.sample_ids[row])
    # each expectation gets what was measured of the same configuration
    columns = {str(configuration): c for c, configuration in enumerate(policy.configurations)}
    for expectation in explained["expected"]:
        cell = (row, columns[str(expectation["configuration"])])
        expectation["measured"] = None
        if table.mask[cell]:
            measured: dict[str, float | None] = {}
            measured |= {name: float(getattr(table, name)[cell]) for name in MEASURED}
            for name, cost in table.costs.items():
                measured[f"cost_{name}"] = float(cost[cell]) if cost[cell].isfinite() else None
            expectation["measured"] = measured
    _print(explained, table)
    return explained


def _other_choices(
    policy: KnobPolicy, table: ProfileTable, row: int, budget_ms: float, drift: Drift | None
) -> dict[str, object]:
    """Return what else is chosen for a row of the table at this budget, with the same drift: by
    `static`, as it is deployed or else fitted on the profile, within the limits that the row must
    keep; and by the policy for `typical` features, their means over the samples; None if it reads
    no features."""
    decider = policy.decider
    static: Policy | None = decider.static
    if static is None:
        problem = replace(Problem.from_table(table), rule=policy.agent.rule)
        static = WAYS[policy.agent.rule.kind].static(problem)
    blocks = blocks_of(table.blocks(torch.tensor(row)), decider)
    mask, _ = decider.allowed({name: block[None] for name, block in blocks.items()}, 1)
    if mask is None:
        mask = np.ones((1, table.num_configurations), bool)
    # the mean offset acts on the budget, as `NumpyController` has it
    limits_ms = np.array([budget_ms]) * decider.factor(drift)
    (choice,) = static.choose({}, limits_ms, mask)
    of_all = table.blocks(torch.arange(table.num_samples))
    means = {name: block.nanmean(0) for name, block in of_all.items()}
    typical = policy.decide(means, budget_ms, drift=drift) if policy.features else None
    return {"static": policy.configurations[choice], "typical": typical}


def _row_of(table: ProfileTable, sample: str) -> int:
    """Return the row of a sample, named ID or, where several data sets have it, DATASET/ID."""
    named = list(zip(table.dataset_names, table.sample_ids, strict=True))
    rows = [row for row, name in enumerate(named) if sample in (name[1], "/".join(name))]
    if not rows:
        raise InputError(
            f"sample={sample}: no such sample in profile {table.name!r} ({table.num_samples} "
            f"samples, e.g. {table.sample_ids[0]})"
        )
    if len(rows) > 1:
        candidates = ", ".join("/".join(named[row]) for row in rows)
        raise InputError(f"sample={sample}: say which of {candidates}")
    return rows[0]


def _drift(path: str | None, policy: KnobPolicy) -> Drift | None:
    """Return the drift that a tracker had learned when its state was written as JSON, if any."""
    if path is None:
        return None
    check_time("tracker", policy.unit)
    tracker = LatencyTracker(policy.configurations, policy.agent.decider.digest)
    try:
        tracker.restore(decode_json(Path(path).read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"tracker={path}: {error}") from error
    return tracker.drift


def _print(explained: dict[str, Any], table: ProfileTable) -> None:
    """Print the best configurations as a table, with the chosen one and its runner-up among them,
    and the rest in sentences."""
    expected = explained["expected"]
    runner_up = explained["runner_up"] or {}
    lines = []
    for i, row in enumerate(expected):
        mark = ""
        if row["configuration"] == explained["decision"]:
            mark = "chosen"
        elif row["configuration"] == runner_up.get("configuration"):
            mark = "runner-up"
        # the chosen one and its runner-up are shown wherever they stand
        if i < MAX_ROWS or mark:
            measured = row["measured"] or {}
            numbers = {key: row[key] for key in EXPECTED if key in row}
            numbers |= {f"measured_{key}": measured.get(key) for key in MEASURED}
            line = {"configuration": setting(row["configuration"]), "": mark}
            for key, value in numbers.items():
                text = format_number(value, ".3f")
                if key.endswith("_ms"):
                    text = quantity(value, table.unit)
                title = key.removesuffix("_ms").replace("_", " ")
                line[in_words(title, table.unit)] = text
            lines.append(line)
    console = Console()
    print_table(console, table_of(lines, ["chosen"]))
    if left_out := len(expected) - len(lines):
        print_lines(console, [f"Configurations left out: {left_out}; json=FILE writes all."])
    print_lines(console, decision(explained, table.unit))
