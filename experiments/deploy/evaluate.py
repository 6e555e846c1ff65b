"""Judge a trained controller again: on the test samples of its own profile, or on another profile. Of a selector: on
the held-out queries of its own beams, or on others."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, make_baselines
from knobwise.agents.selector.evaluation import decide_selector, decide_simple
from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.stack.priced_policy import PricedChooser, make_priced_baselines
from knobwise.agents.training.settings import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.envs.configurations.budgets import judged_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.readers.joint import DATASET
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import budget_rows, divide
from knobwise.experiments.report.report import print_results
from knobwise.experiments.report.verdict import on_decisions
from knobwise.experiments.results.mean_results import mean_results_of
from knobwise.experiments.results.results import held_out_choices, results_of
from knobwise.experiments.results.selector_results import selector_results
from knobwise.experiments.settings.beams import check_judged, read_data
from knobwise.experiments.settings.options import EvaluateRun, LiveConfig
from knobwise.experiments.settings.profiles import read_profile


def run(config: EvaluateRun) -> dict[str, Any]:
    """Print, and write when asked for, what a controller gets beside the baselines; returns the results.

    On the profile that the controller was trained on (same digest) the test samples are those kept from it in training,
    and the baselines are fitted on what it was fitted on. On another profile with the same configurations a split is
    made anew, and test samples that the controller has seen in training (the same features, or without features the
    same id) are left out. A controller for mean budgets is judged at those that it was calibrated for.

    Raises:
        InputError: no such checkpoint, or a profile with other configurations or features; of a selector, beams with
            embeddings of another width, or without a query that it was not trained on.
    """
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    loaded = load_checkpoint(config.checkpoint)
    if isinstance(loaded.agent, Selector):
        results = evaluate_selector(loaded, config)
        _tell(results, config)
        return results
    if not config.live and config.stream != LiveConfig():
        raise InputError("stream: is for live=true, which serves a stream of requests instead of replaying the profile")
    table = read_profile(config.profile)
    if config.live:
        from knobwise.experiments.deploy.live import run_live

        given = {name: getattr(config, name) for name in ("json", "budgets_ms") if getattr(config.stream, name) is None}
        return run_live(config.checkpoint, table, replace(config.stream, **given))
    decides = loaded.controller
    controller = decides.chooser if isinstance(decides, PricedChooser) else decides
    if controller.priced and controller is decides:
        raise InputError(f"{config.checkpoint}: its prices were not calibrated yet; let its training end")
    if table.knobs != controller.knobs or not torch.equal(table.configurations, controller.configurations):
        raise InputError(
            f"{config.checkpoint}: was trained for {len(controller.configurations)} configurations of "
            f"{', '.join(k.name for k in controller.knobs)}; profile {table.name!r} has others"
        )
    names = sorted(set(table.dataset_names))
    if DATASET in table.features and (told := loaded.extra.get("told", names)) != names:
        raise InputError(
            f"{config.checkpoint}: was told which of the data sets {', '.join(told)} a sample is from, and profile "
            f"{table.name!r} has {', '.join(names)}; train without dataset_input for data sets that are new"
        )
    controller.features(table.features, table.num_samples)  # other features than it was trained with: say so first
    split = divide(table, **asdict(config.split))
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
    with threadpool_limits(config.threads):
        if isinstance(decides, PricedChooser):
            results = _under_mean_budgets(config, table, split, decides)
        else:
            budgets_ms = judged_budgets(table, config.budgets_ms, budget_rows(table, split))
            rewards = RewardTable(table, config.reward)
            fitted = torch.cat([split.train, split.validation])
            few = [BudgetAwareStatic(table, fitted), Oracle(table, split.test)]
            baselines = make_baselines(table, split, seed=0, budgets_ms=budgets_ms) if config.baselines else few
            results = results_of(table, split.test, budgets_ms, rewards, [decides], [0], baselines)
    results |= held_out_choices([loaded])
    _tell(results, config)
    if said := on_decisions(results):
        print(said)
    return results


def _tell(results: dict[str, Any], config: EvaluateRun) -> None:
    if config.json is not None:
        with written_whole(Path(config.json)) as temporary:
            temporary.write_text(json.dumps(results, indent=1))
    print_results(results, Console())


def _under_mean_budgets(
    config: EvaluateRun, table: ProfileTable, split: Split, controller: PricedChooser
) -> dict[str, Any]:
    """At the mean budgets that the controller was calibrated for; asking for another is refused."""
    if config.budgets_ms is not None:
        controller.groups(torch.tensor(config.budgets_ms))
    budgets_ms = controller.budgets_ms
    baselines = make_priced_baselines(table, split, budgets_ms) if config.baselines else []
    fitted = torch.cat([split.train, split.validation])
    return mean_results_of(table, fitted, split.test, budgets_ms, [controller], [0], baselines)


def evaluate_selector(loaded: Loaded, config: EvaluateRun) -> dict[str, Any]:
    """A selector beside the simple ways, at every number of shots asked for; queries that it was trained on are left
    out."""
    data, selector = read_data(config.beams), loaded.selector
    embeddings, rows = StoredEmbeddings(data.test.queries, data.test.candidates), data.test_rows
    check_judged(data, config.judged_shots)
    if data.table.digest == loaded.profile_digest and data.test_scorer is None:
        if "fitted" not in loaded.extra:
            raise InputError(f"{config.checkpoint}: does not say which queries it was trained on; use a best.pt")
        seen = set(loaded.extra["fitted"])
        rows = torch.tensor([row for row in range(data.test.num_queries) if data.test.query_ids[row] not in seen])
    if not len(rows):
        raise InputError(f"{config.checkpoint}: was trained on every query of {data.test.name!r}")
    name = loaded.extra.get("policy", selector.stage)
    correct: dict[str, dict[int, torch.Tensor]] = {name: {}}
    for shots in config.judged_shots:
        chosen = decide_selector(selector, embeddings, data.test, data.test_scorer, shots, rows)
        correct[name][shots] = chosen.correct
        if config.baselines:
            simple = decide_simple(data.test, data.test_scorer, shots, rows=rows, trusted=data.trusted)
            for way, found in simple.items():
                correct.setdefault(way, {})[shots] = found.correct
    return selector_results(
        correct,
        data.test,
        seeds=[0],
        trained_shots=loaded.extra.get("shots", config.judged_shots[0]),
        judged_by=data.judged_by,
    )
