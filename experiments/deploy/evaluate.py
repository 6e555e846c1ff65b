"""Judge a trained agent again: a controller on the test samples of its own profile or on another
profile, a selector on the held-out queries of its own beams or on others."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import polars as pl
import torch
from rich.console import Console
from threadpoolctl import threadpool_limits

from knobwise.agents.calibration.promise import wanted_rows
from knobwise.agents.calibration.ways import WAYS
from knobwise.agents.evaluation.baselines import FittedStatic
from knobwise.agents.evaluation.limits import budget_with
from knobwise.agents.evaluation.problems import judged_part, problem_of
from knobwise.agents.selector.clip_encoder import as_read
from knobwise.agents.selector.selector import Selector
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.common.checks import a_device
from knobwise.common.errors import InputError, naming
from knobwise.common.files import write_json
from knobwise.common.progress import say
from knobwise.common.words import quantity
from knobwise.envs.bandit.reward import RewardTable
from knobwise.envs.bandit.settings import reward_of
from knobwise.envs.tables.divisions import divide
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.units import check_time
from knobwise.experiments.evidence.controllers import (
    evaluator_of,
    gain_on_held_out,
    held_out_choices,
    validation_scores,
)
from knobwise.experiments.evidence.decisions import write_decisions
from knobwise.experiments.evidence.evaluate import check_fits
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.evidence.selectors import evaluate_selectors
from knobwise.experiments.report.report import print_results
from knobwise.experiments.settings.beams import check_judged, read_data, trained_on
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.deployment_options import EvaluateRun, ExplainRun, ExportRun
from knobwise.experiments.settings.measured_with import measured_at_once, unlike_measuring
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.train.judging import evaluate_beside_baselines
from knobwise.profiling.endpoint.settings import NAME as ENDPOINT
from knobwise.profiling.endpoint.settings import NAMES, endpoint_options


def evaluate_run(config: EvaluateRun) -> RunResults:
    """Judge an agent beside the baselines, print the results, write them to `json` if it is set,
    and return them.

    On the profile that the controller was trained on (same digest) it is judged on the test samples
    of that training, and the baselines are fitted on what it was fitted on. Another profile is
    split anew, without test samples that the controller has seen (the same features, or without
    features the same id). Nor is a selector judged on queries that it was trained on, see
    `trained_on`.

    Raises:
        InputError: no such checkpoint, or a profile or beams that it cannot decide on, or was
            trained on entirely.
    """
    # options that only live=true has
    live = ("stream", "html", "model", "data", "knobs", "importance", "dtype", "device", *NAMES)
    for name in live:
        if not config.live and getattr(config, name) != getattr(EvaluateRun(), name):
            raise InputError(
                f"{name}: is for live=true, which serves requests instead of replaying the profile"
            )
    torch.set_num_threads(1)
    checkpoint = checkpoint_at(config.checkpoint)
    loaded = load_checkpoint(checkpoint, config.rule)
    is_selector = isinstance(loaded.agent, Selector)
    if config.live and not is_selector:
        return _evaluate_live(checkpoint, loaded, config)
    if is_selector:
        results, decisions = evaluate_selector(loaded, config)
    else:
        results, decisions = evaluate_controller(loaded, config)
    write_json(config.json, results)
    if config.decisions is not None:
        write_decisions(config.decisions, decisions)
    print_results(results, Console())
    return results


def _evaluate_live(checkpoint: Path, loaded: Loaded, config: EvaluateRun) -> RunResults:
    """Serve a simulated stream of requests by the real model."""
    check_time("live=true", loaded.controller.controller.unit)
    a_device(config.device, usable=True)
    from knobwise.experiments.deploy.live import run_live
    from knobwise.profiling.models import load_model, requests_of

    table = read_profile(config.profile, loaded)
    knobs = config.knobs
    path = getattr(config.profile, "path", None)
    behind_endpoint = config.model == ENDPOINT
    # nothing is asked before
    for line in unlike_measuring(path, knobs, config if behind_endpoint else None):
        say(line)
    if behind_endpoint:
        # an endpoint has the knobs that were measured
        knobs = replace(knobs, values={knob.name: [*knob.values] for knob in table.knobs})
        at_once = measured_at_once(path)
        if at_once is not None and at_once > 1:
            say(
                f"the profile was measured with {at_once} requests at once; here they come one at "
                "a time, which may be faster"
            )
    model, items = load_model(
        config.model,
        config.data,
        knobs,
        endpoint=endpoint_options(config),
        importance=config.importance,
        dtype=config.dtype,
        device=config.device,
    )
    with ExitStack() as stack:
        if hasattr(model, "close"):
            stack.callback(model.close)
        requests = requests_of(items, config.knobs)
        config = replace(config, budgets_ms=wanted_budgets(config, loaded, table))
        return run_live(checkpoint, loaded, table, model, requests, config)


def evaluate_controller(loaded: Loaded, config: EvaluateRun) -> tuple[RunResults, pl.DataFrame]:
    """Judge a controller beside the baselines at every budget."""
    table = fitting_profile(config, loaded)
    policy = loaded.controller
    split = _split_for(loaded, table, config)
    wanted = wanted_budgets(config, loaded, table)
    budget = budget_with(policy.rule, policy.calibration.limits)
    problem = problem_of(table, split, budget, config.unprofiled)
    if policy.calibration.promise:
        # calibrated already: it only says what is judged
        problem = replace(problem, calibration=split.test[:0])
    budgets_ms = WAYS[policy.rule.kind].budgets_for(policy, problem, wanted)
    budgets = ", ".join(quantity(budget, table.unit) for budget in budgets_ms.tolist())
    print(f"judged on {len(split.test):,} test samples, at budgets {budgets}", flush=True)
    rule = problem.rule
    if rule.is_own:
        print(f"utility is what the rule {rule.words} says", flush=True)
    reward = reward_of(rule.name) if rule.is_own else config.reward
    rewards = RewardTable(problem.values, reward, cells=problem.cells, rule=rule)
    judged = evaluator_of(problem, budgets_ms, rewards)
    # choices that were measured for judging (`profile complete=`) are those of this static policy
    if policy.calibration.judged and loaded.profile_digest == table.digest:
        judged.references[0] = FittedStatic(policy.calibration.static)
    with threadpool_limits(1):
        results, decisions = evaluate_beside_baselines(judged, config, [policy], [0])
    results |= held_out_choices([loaded]) | validation_scores([loaded])
    if gain := gain_on_held_out([loaded]):
        results |= {"grpo_gain": gain}
    if method := loaded.extra.get("method"):
        results |= {"training": {"method": method}}
    return results, decisions


def wanted_budgets(config: EvaluateRun, loaded: Loaded, table: ProfileTable) -> list[float] | None:
    """Return the budgets in the settings; where there are none, on the profile of the training,
    those that the controller was calibrated for, or if it was not those of its run. None for
    those that suit the table."""
    if config.budgets_ms is not None or loaded.profile_digest != table.digest:
        return config.budgets_ms
    calibration = loaded.controller.calibration
    promised = [row["budget_ms"] for row in wanted_rows(calibration.promise)]
    calibrated = promised or [row["budget_ms"] for row in calibration.guard]
    return calibrated or of_run(config.checkpoint, "budgets_ms")


def fitting_profile(config: EvaluateRun | ExplainRun | ExportRun, loaded: Loaded) -> ProfileTable:
    """Read the profile that a controller is to decide on.

    Raises:
        InputError: its configurations, features or unit are not those that the controller was
            trained with, or the controller has no prices.
    """
    table = read_profile(config.profile, loaded)
    checkpoint = config.checkpoint
    agent = loaded.controller
    with naming(checkpoint):
        WAYS[agent.rule.kind].check_trained(agent)
    check_fits(checkpoint, agent, table)
    return table


def _split_for(loaded: Loaded, table: ProfileTable, config: EvaluateRun) -> Split:
    """Return the split of the training or, for another profile, a new split without test samples
    that the controller has seen."""
    if "seen" not in loaded.extra:
        raise InputError(
            f"{config.checkpoint}: does not say which samples it was trained on; use a best.pt"
        )
    # the split of the training, if this is its profile
    split = divide(table, **asdict(config.split))
    if loaded.profile_digest == table.digest and loaded.split is not None:
        return loaded.split
    # samples are recognised by their features, or by their ids where there are none
    seen = set(loaded.extra["seen"])
    new = torch.tensor([fingerprint not in seen for fingerprint in table.fingerprints(split.test)])
    print(
        f"not the training profile: {int(new.sum())} of its {len(new)} test samples are new",
        flush=True,
    )
    if not new.any():
        raise InputError(
            f"{config.checkpoint}: was trained on every test sample of profile {table.name!r}"
        )
    return judged_part(split._replace(test=split.test[new]))


def evaluate_selector(loaded: Loaded, config: EvaluateRun) -> tuple[RunResults, pl.DataFrame]:
    """Judge a selector beside the simple policies at every number of shots. Queries that it was
    trained on are left out."""
    data = read_data(config.beams, config.encoder)
    rows = data.test_rows
    check_judged(data, config.judged_shots)
    if not data.has_own_test:
        if "fitted" not in loaded.extra:
            raise InputError(
                f"{config.checkpoint}: does not say which queries it was trained on; use a best.pt"
            )
        new = ~trained_on(loaded, data.table, data.items)
        # on its own beams all others are judged, whatever the split
        digest = as_read(data.table, data.items).digest
        if loaded.profile_digest == digest or loaded.profile_name == data.table.name:
            rows = new.nonzero().flatten()
        else:
            print(
                f"not the training beams: {int(new[rows].sum())} of their {len(rows)} test queries "
                "are new",
                flush=True,
            )
            rows = rows[new[rows]]
    if not len(rows):
        raise InputError(f"{config.checkpoint}: was trained on every query of {data.test.name!r}")
    policy = loaded.extra.get("policy") or loaded.selector.stage
    return evaluate_selectors(
        data._replace(test_rows=rows),
        {policy: [loaded]},
        judged_shots=config.judged_shots,
        seeds=[0],
        trained_shots=loaded.extra.get("shots", config.judged_shots[0]),
        hidden={policy: []},
        baselines=config.baselines,
    )
