"""Judge a trained controller again: on the test samples of its own profile, or on another profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

from knobwise.agents.baselines import BudgetAwareStatic, Oracle, make_baselines
from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.settings import at_least
from knobwise.envs.budgets import judged_budgets
from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole
from knobwise.envs.reward import RewardTable
from knobwise.envs.table import Split
from knobwise.experiments.report import print_results
from knobwise.experiments.results import results_of
from knobwise.experiments.settings import EvaluateRun, read_profile


def run(config: EvaluateRun) -> dict[str, Any]:
    """Print, and write when asked for, what a controller gets beside the baselines; returns the results.

    On the profile that the controller was trained on (same digest) the test samples are those kept from it in training,
    and the baselines are fitted on what it was fitted on. On another profile with the same configurations a split is
    made anew, and test samples that the controller has seen in training (the same features, or
    without features the same id) are left out.

    Raises:
        InputError: no such checkpoint, or a profile with other configurations or features.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    loaded = load_checkpoint(config.checkpoint)
    table = read_profile(config.profile)
    controller = loaded.controller
    if table.knobs != controller.knobs or not torch.equal(table.configurations, controller.configurations):
        raise InputError(
            f"{config.checkpoint}: was trained for {len(controller.configurations)} configurations of "
            f"{', '.join(k.name for k in controller.knobs)}; profile {table.name!r} has others"
        )
    controller.features(table.features, table.num_samples)  # other features than it was trained with: say so first
    split = table.split(config.split.train, config.split.validation, config.split.seed)
    if "seen" not in loaded.extra:
        raise InputError(f"{config.checkpoint}: does not say which samples it was trained on; use a best.pt")
    if loaded.profile_digest == table.digest:
        split = Split(*(loaded.extra[f"{part}_rows"] for part in Split._fields))
    else:
        seen = set(loaded.extra["seen"])
        new = torch.tensor([print_ not in seen for print_ in table.fingerprints(split.test)])
        print(
            f"not the profile of the training: {int(new.sum())} of its {len(new)} test samples are new",
            flush=True,
        )
        if not new.any():
            raise InputError(f"{config.checkpoint}: was trained on every test sample of profile {table.name!r}")
        split = split._replace(test=split.test[new])
    budgets_ms = judged_budgets(table, config.budgets_ms)
    if config.baselines:
        with threadpool_limits(config.threads):
            baselines = make_baselines(table, split, seed=0, budgets_ms=budgets_ms)
    else:
        baselines = [BudgetAwareStatic(table, split.train), Oracle(table, split.test)]
    rewards = RewardTable(table, config.reward)
    results = results_of(table, split.test, budgets_ms, rewards, [controller], [0], baselines)
    if config.json is not None:
        with written_whole(Path(config.json)) as temporary:
            temporary.write_text(json.dumps(results, indent=1))
    print_results(results, Console())
    return results
