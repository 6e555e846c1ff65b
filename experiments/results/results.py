"""results.json: what a run found, one row for each policy and budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import Chooses, Judged, bootstrap, judge, mean_row
from knobwise.agents.stack.priced_policy import PricedChooser
from knobwise.agents.stack.stacked_controller import StackedController
from knobwise.common.progress import progress
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.results import decisions_file

SHOWN_IN_USAGE = ("controller", "budget_aware_static", "oracle")
SHOWN_BY_DATASET = ("controller", "budget_aware_static", "static_per_dataset", "oracle")
KNOW_THE_ROWS = ("static_per_dataset", "oracle")


def results_of(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[Chooses],
    seeds: Sequence[int],
    baselines: Sequence[Any],
    judged: Mapping[str, list[Judged]] | None = None,
) -> dict[str, Any]:
    """Judge controllers (one for each seed) and baselines on the same samples under the same budgets.

    Args:
        table: the profile.
        test: int64 [n], samples that nothing was fitted or chosen on.
        budgets_ms: float [B].
        rewards: the reward of the column `reward`.
        controllers: one for each seed; numbers are means over them, intervals are over samples and seeds.
        seeds: of the controllers.
        baselines: with a `name`; `budget_aware_static` and `oracle` must be among them.
        judged: what `judge_policies` gives for the same arguments, where that is at hand.

    Returns:
        the content of `results.json`, with `by_dataset` where the samples are of several data sets.
    """
    judged = judged or judge_policies(table, test, budgets_ms, rewards, controllers, baselines)
    deciders: dict[str, Chooses] = {"controller": controllers[0], **{b.name: b for b in baselines}}
    # what knows the rows looks things up, which no request could
    decision = {n: None if n in KNOW_THE_ROWS else decision_us(c, table, test, budgets_ms) for n, c in deciders.items()}
    rows = [
        {"policy": name, **_row(judged, name, budget), "decision_us_p50": decision[name]}
        for name in judged
        for budget in [None, *range(len(budgets_ms))]
    ]
    return {
        "profile": profile_of(table),
        "split": "test",
        "test_samples": len(test),
        "seeds": list(seeds),
        "unit": table.unit,
        "budgets_ms": budgets_ms.tolist(),
        "rows": rows,
        "configurations": configurations_of(table, test),
        "knob_usage": [use for name in SHOWN_IN_USAGE for use in _usage(table, name, judged[name])],
        **_by_dataset(table, test, judged),
    }


def profile_of(table: ProfileTable) -> dict[str, Any]:
    """What results say of the profile: its name, digest and sizes."""
    sizes = {"samples": table.num_samples, "configurations": table.num_configurations}
    return {"name": table.name, "digest": table.digest, **sizes}


def judge_policies(
    table: ProfileTable,
    test: Tensor,
    budgets_ms: Tensor,
    rewards: RewardTable,
    controllers: Sequence[Chooses],
    baselines: Sequence[Any],
) -> dict[str, list[Judged]]:
    """What came of every decision, by policy: of `controller` one for each seed, of each baseline one. The arguments
    are those of `results_of`."""
    judged: dict[str, list[Judged]] = {}
    everyone = [*(("controller", c) for c in controllers), *((b.name, b) for b in baselines)]
    with progress("judging", len(everyone), quiet_s=2) as tick:
        for done, (name, chooser) in enumerate(everyone, 1):
            judged.setdefault(name, []).append(judge(chooser, table, test, budgets_ms, rewards))
            tick(done, name)
    return judged


def decisions_of(
    table: ProfileTable, test: Tensor, judged: Mapping[str, list[Judged]], seeds: Sequence[int]
) -> pl.DataFrame:
    """The content of `decisions.parquet` (`knobwise.experiments.results.decisions_file.CONTROLLER`).

    Args:
        table: the profile.
        test: int64 [n].
        judged: on these samples; of `controller` one for each of `seeds`.
        seeds: of the controllers.
    """
    frames = []
    for name, of_policy in judged.items():
        for seed, one in zip(seeds if name == "controller" else [None], of_policy, strict=True):
            columns = {"configuration": one.chosen, "accuracy": one.accuracy, "latency_ms": one.latency_ms}
            columns |= {"in_time": one.met, "feasible": one.feasible, "utility": one.utility}
            frames.append(
                decision_cells(table, test, one.budgets_ms, columns).with_columns(policy=pl.lit(name), seed=seed)
            )
    return pl.concat(frames, how="vertical_relaxed")


def decision_cells(
    table: ProfileTable, rows: Tensor, budgets_ms: Tensor, columns: Mapping[str, Tensor | None]
) -> pl.DataFrame:
    """One row for each sample and budget: who it is, and `columns`.

    Args:
        table: the profile.
        rows: int64 [n].
        budgets_ms: float [B].
        columns: by name [n, B], None for null everywhere. `configuration` holds indices, −1 where there is none, and
            becomes labels.
    """
    places = rows.repeat_interleave(len(budgets_ms)).tolist()
    labels = [table.label(c) for c in range(table.num_configurations)]
    found: dict[str, Any] = {
        "sample_id": [table.sample_ids[i] for i in places],
        "dataset": [table.datasets[i] for i in places] if table.datasets else [None] * len(places),
        "budget_ms": budgets_ms.double().repeat(len(rows)).tolist(),
    }
    for name, values in columns.items():
        plain: list[Any] = [None] * len(places) if values is None else values.flatten().tolist()
        found[name] = [None if c < 0 else labels[c] for c in plain] if name == "configuration" else plain
    return pl.DataFrame(found, schema={name: decisions_file.CONTROLLER[name] for name in found})


def _row(judged: Mapping[str, list[Judged]], name: str, budget: int | None) -> dict[str, Any]:
    """One row, with intervals; `budget` is the number of a budget, or None for the mean over budgets."""
    of_seeds = judged[name]
    columns = slice(None) if budget is None else slice(budget, budget + 1)
    utility = torch.stack([j.utility for j in of_seeds])  # [S, n, B]
    ends = judged["budget_aware_static"][0].utility, judged["oracle"][0].utility
    own, low, high = (t[..., columns].double().mean(-1) for t in (utility, *ends))
    row = mean_row([j.row(budget) for j in of_seeds])
    between = float(high.mean() - low.mean())
    row["gap_closed"] = float(own.mean() - low.mean()) / between if between > 0 else 0.0
    row |= bootstrap(own, low, high)
    return row | ({"utility_per_seed": own.mean(1).tolist()} if len(of_seeds) > 1 else {})


def _by_dataset(table: ProfileTable, test: Tensor, judged: Mapping[str, list[Judged]]) -> dict[str, Any]:
    """`by_dataset`: for each data set the means over budgets of the policies of `SHOWN_BY_DATASET` and of the one that
    is best there of all others; nothing for one data set."""
    parts = rows_by_dataset(table, test)
    rows = []
    for dataset, places in parts.items() if len(parts) > 1 else ():
        own = {name: [_of(j, places) for j in of_seeds] for name, of_seeds in judged.items()}
        utility = {name: sum(float(j.utility.mean()) for j in seeds) / len(seeds) for name, seeds in own.items()}
        others = sorted(own.keys() - SHOWN_BY_DATASET, key=lambda name: (-utility[name], name))
        for name in [n for n in (*SHOWN_BY_DATASET[:-1], *others[:1], "oracle") if n in own]:
            rows.append({"dataset": dataset, "samples": len(places), "policy": name, **_row(own, name, None)})
    return {"by_dataset": rows} if rows else {}


def _of(judged: Judged, places: Tensor) -> Judged:
    """The outcome for some of the samples."""
    return replace(
        judged, **{f.name: getattr(judged, f.name)[places] for f in fields(judged) if f.name != "budgets_ms"}
    )


def held_out_choices(loaded: Sequence[Loaded]) -> dict[str, Any]:
    """What was found on held-out samples in training, for `results.json`; every list has one entry for each seed.

    `guard`: rows of `Guard.rows`, or under mean budgets of `knobwise.agents.stack.priced_policy.compared`, []
    without any guard.
    `chosen`: the weights of the stack, the settings of its experts, the iteration that the network is of.
    `satisfaction_level`: what the guard was asked to keep, if any.
    """
    chosen, guards = [], []
    for controller, extra in ((one.controller, one.extra) for one in loaded):
        found: dict[str, Any] = {"weights": {"network": 1.0}, "settings": {}}
        if isinstance(controller, PricedChooser):
            guards += [controller.guard] if controller.guard else []
            controller = controller.chooser
        if isinstance(controller, StackedController):
            found = controller.chosen()
            if controller.guard is not None:
                guards.append(controller.guard.rows())
        chosen.append(found | {"iteration": extra["iteration"]})
    level = {"satisfaction_level": guards[0][0]["level"]} if guards and "level" in guards[0][0] else {}
    return {"guard": guards, "chosen": chosen, **level}


def decision_us(chooser: Chooses, table: ProfileTable, rows: Tensor, budgets_ms: Tensor, repeats: int = 30) -> float:
    """Median time of one decision for one sample, in µs, on the CPU, features already at hand."""
    times = []
    for i in range(repeats):
        row = rows[i % len(rows)].unsqueeze(0)
        features = {name: block[row] for name, block in table.features.items()}
        budget, mask = budgets_ms[i % len(budgets_ms)].unsqueeze(0), table.mask[row]
        start = time.perf_counter()
        chooser.choose(features, budget, mask)
        times.append(time.perf_counter() - start)
    return float(torch.tensor(times).median()) * 1e6


def configurations_of(table: ProfileTable, rows: Tensor) -> list[dict[str, Any]]:
    """Mean accuracy and latency of each configuration over the samples it was profiled for."""
    accuracy, latency = table.accuracy[rows].nanmean(0).tolist(), table.latency_ms[rows].nanmean(0).tolist()
    seen = table.mask[rows].any(0).tolist()
    return [
        {"label": table.label(c), "knobs": table.configuration(c), "accuracy": accuracy[c], "latency_ms": latency[c]}
        for c in range(table.num_configurations)
        if seen[c]
    ]


def _usage(table: ProfileTable, policy: str, judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """How often a policy set each knob to each value, under each budget."""
    values = table.configurations[torch.cat([j.chosen for j in judged])]  # [S·n, B, K]
    return [
        {"policy": policy, "budget_ms": float(budget), "knob": knob.name, "value": value, "share": share}
        for k, knob in enumerate(table.knobs)
        for b, budget in enumerate(judged[0].budgets_ms)
        for value, share in zip(
            knob.values,
            (torch.bincount(values[:, b, k], minlength=len(knob.values)) / len(values)).tolist(),
            strict=True,
        )
    ]
