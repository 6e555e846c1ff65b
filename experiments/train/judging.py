"""Judge what a run has trained, as it is deployed, beside every simple policy: the contents of
`results.json` and of `decisions.parquet`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import torch
from threadpoolctl import threadpool_limits

from knobwise.agents import deployed as policy_package
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.mean_policies import MixingPolicy
from knobwise.agents.calibration.training import best_is_of_grpo, gained_by_sample
from knobwise.agents.evaluation.policy import Baseline
from knobwise.agents.teacher.experts import Experts, sampled_positions
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.agents.training.trainer import Trainer
from knobwise.envs.tables.divisions import divide
from knobwise.experiments.evidence.controllers import (
    controller_results,
    evaluate_controllers,
    evaluator_of,
    gain_on_held_out,
    held_out_choices,
    is_score_known,
    validation_scores,
)
from knobwise.experiments.evidence.evaluate import Deadlines
from knobwise.experiments.evidence.explanation import Explained, explain_policy
from knobwise.experiments.evidence.exports import export_beside
from knobwise.experiments.evidence.mean_budgets import MeanBudgets
from knobwise.experiments.evidence.schema import Attainable, GrpoGain, RunResults, TrainingFacts
from knobwise.experiments.evidence.task import DEADLINE
from knobwise.experiments.inspection.attainable import add_shares, attainable_by
from knobwise.experiments.settings.deployment_options import EvaluateRun
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.profiles import read_questions
from knobwise.experiments.train.run import keep_best, patience_of, seed_folder, split_folder

if TYPE_CHECKING:
    from knobwise.experiments.train.controller import ControllerExperiment, SplitTraining


def calibrate_trained(training: SplitTraining, trainer: Trainer) -> Loaded:
    """Return the controller that a finished training deploys, after its calibration."""
    # a finished training that was resumed holds its last weights, not its best
    trainer.agent.load_state_dict(trainer.state.best.state)
    with threadpool_limits(training.config.threads):
        agent = calibrate_controller(trainer.setup, training.budgets_ms)
    extra = trainer.provenance(trainer)
    extra["grpo"] = {}
    extra["before_grpo"] = None
    # what predictions say of held-out samples is no evidence
    if training.problem.beliefs is None:
        extra["grpo_held_out"] = gained_by_sample(trainer)
    scores = trainer.stages[-1].scores_before
    if scores is not None:
        extra["grpo"] = {"start": float(scores.mean())}
        # where the kept weights are from before GRPO, it added nothing
        before = agent.controller
        if best_is_of_grpo(trainer):
            before = trainer.setup.reference
        extra["before_grpo"] = before.state_dict()
    facts = training.problem.facts
    return Loaded(agent, facts.name, facts.digest, extra)


def judge_run(experiment: ControllerExperiment, folder: Path) -> tuple[RunResults, pl.DataFrame]:
    """Judge a run that is trained, and keep what it deploys: that of the first split, explained.

    Rows are means over the splits; a sample counts once for each split that judges it.
    """
    first, *others = experiment.splits
    results, decisions = judge_split(first, folder)
    results |= facts_of_deployed(experiment, folder, is_score_known(results))
    if not others:
        return results, decisions
    promises = results.get("promises", [])
    frames = [decisions.with_columns(split=pl.lit(0, pl.Int64))]
    for other in others:
        of_split, judged = judge_split(other, split_folder(folder, other.number))
        promises += [row | {"split": other.number} for row in of_split.get("promises", [])]
        frames.append(judged.with_columns(split=pl.lit(other.number, pl.Int64)))
    decisions = pl.concat(frames)
    tests = torch.cat([training.problem.split.test for training in experiment.splits])
    whole = evaluator_of(first.problem.judged_on(tests), first.budgets_ms)
    split = experiment.config.split
    # folds share one seed
    seeds = [split.seed] * split.folds or range(split.seed, split.seed + split.repeats)
    results |= controller_results(whole, decisions, experiment.config.seeds)
    results |= {"split_seeds": list(seeds)}
    if promises:
        results["promises"] = promises
    add_shares(results)
    return results, decisions


def judge_split(training: SplitTraining, folder: Path) -> tuple[RunResults, pl.DataFrame]:
    """Judge the controllers of one split on its test part, and export the one of the seed that was
    best on validation."""
    folders = [seed_folder(folder, seed) for seed in training.config.seeds]
    best = [load_checkpoint(checkpoints / "best.pt") for checkpoints in folders]
    results, decisions = judge_controllers(training, best)
    scores = [float(loaded.extra["validation_utility"]) for loaded in best]
    keep_best(folder, dict(zip(folders, scores, strict=True)))
    kept = folder / "checkpoints" / "best.pt"
    export_beside(kept, load_checkpoint(kept).controller, folder)
    copy_policy(folder)
    return results, decisions


def facts_of_deployed(experiment: ControllerExperiment, folder: Path, known: bool) -> RunResults:
    """Return what is noted of the split whose controller is deployed: warnings, why the controller
    chooses as it does, and what a large table was sampled for; for `known` see `explain_policy`."""
    first = experiment.splits[0]
    problem = first.problem
    config = experiment.config
    facts: RunResults = {"warnings": experiment.warnings}
    # how many samples are used, and how many there are
    whole = divide(problem.facts, **asdict(config.split)).test
    parts = {"test": [len(problem.split.test), len(whole)]}
    if config.policy.experts or config.baselines:
        fitted = len(problem.split.fitted)
        parts["experts"] = [
            len(sampled_positions(fitted, problem.facts.num_configurations)),
            fitted,
        ]
    if part := {name: used for name, used in parts.items() if used[0] < used[1]}:
        facts["sampled"] = part
    kept = load_checkpoint(folder / "checkpoints" / "best.pt").controller
    questions = read_questions(config.profile)
    with threadpool_limits(config.threads):
        evaluator = evaluator_of(problem, first.budgets_ms)
        budgets_ms, static, prices = evaluator.explained_by(kept)
        test = problem.split.test
        explained = Explained(problem, test, kept, budgets_ms, static, prices=prices)
        facts["explanation"] = explain_policy(explained, questions, known)
    return facts


def judge_controllers(
    training: SplitTraining, best: list[Loaded]
) -> tuple[RunResults, pl.DataFrame]:
    """Return the contents of `results.json` and of `decisions.parquet`.

    They hold what all seeds deploy, its teachers, and the baselines.

    Args:
        best: the best checkpoint of each seed.
    """
    config = training.config
    scores = [float(loaded.extra["validation_utility"]) for loaded in best]
    controllers = [loaded.controller for loaded in best]
    before = [before_grpo(loaded) for loaded in best]
    rewards = training.trainers[0].setup.held_out.rewards
    evaluator = evaluator_of(training.problem, training.budgets_ms, rewards)
    experts = training.experts if config.baselines else None
    with threadpool_limits(config.threads):
        results, decisions = evaluate_beside_baselines(
            evaluator, config, controllers, config.seeds, experts, training.fold_seed, before
        )
    gain: GrpoGain = results.pop("grpo_gain", {})
    gain |= gain_on_held_out(best)
    if gain:
        results["grpo_gain"] = gain
    first = training.trainers[0]
    iterations = config.optimiser.iterations
    # the stages before GRPO: the teacher's and the warm-up
    trained: TrainingFacts = {
        "warmup_iterations": first.total - iterations,
        "iterations": iterations,
        "method": first.stages[-1].name,
        "hidden": config.policy.hidden,
        # the iterations without a better score after which it stops, and where each seed ended
        "patience": patience_of(first),
        "ended_at": [trainer.state.iteration for trainer in training.trainers],
    }
    if config.loss.is_own:
        trained["loss"] = config.loss.objective
        trained["loss_settings"] = dict(config.loss.settings or {})
    results |= held_out_choices(best) | validation_scores(best)
    results |= {
        "best_seed": config.seeds[scores.index(max(scores))],
        "training": trained,
    }
    return results, decisions


def evaluate_beside_baselines(
    evaluator: Deadlines | MeanBudgets,
    config: TrainRun | EvaluateRun,
    controllers: Sequence[DeployedController],
    seeds: Sequence[int],
    experts: Experts | None = None,
    fold_seed: int = 0,
    before: Sequence[DeployedController | None] = (),
) -> tuple[RunResults, pl.DataFrame]:
    """Judge controllers beside every simple way, see `evaluate_controllers`.

    Args:
        config: says whether there are all baselines, and whether controllers pay for decisions.
        experts: what the baselines predict with; None fits them.
        fold_seed: seed of the folds of the baselines.
    """
    table = evaluator.table
    baselines: Sequence[Baseline] | Sequence[MixingPolicy] = evaluator.references
    estimate: Attainable | None = None
    if config.baselines:
        if experts is None:
            budgets_ms = evaluator.problem.rule.deadlines(evaluator.budgets_ms)
            fitted = evaluator.problem.split.fitted
            rule = evaluator.problem.rule
            experts = Experts.fit(table, fitted, budgets_ms, tuple(FAMILIES), fold_seed, rule=rule)
        if evaluator.task is DEADLINE and table.features:
            estimate = attainable_by(evaluator.problem, experts, evaluator.budgets_ms)
        baselines = evaluator.baselines(experts, fold_seed)
    results, decisions = evaluate_controllers(
        evaluator, controllers, seeds, baselines, config.own_cost, before
    )
    # it too rests on predictions where a static choice was hardly ever measured
    if estimate and is_score_known(results, evaluator.task.low):
        results["attainable"] = estimate
        add_shares(results)
    return results, decisions


def before_grpo(loaded: Loaded) -> DeployedController | None:
    """Return the controller of a checkpoint as it was before GRPO; None without GRPO or without a
    warm-up."""
    state = loaded.extra.get("before_grpo")
    if state is None:
        return None
    agent = loaded.controller
    controller = copy.deepcopy(agent.controller)
    controller.load_state_dict(state)
    return DeployedController(controller, agent.teacher, agent.calibration)


def copy_policy(folder: Path) -> None:
    """Copy the package `policy`, which decides by `controller.npz`, into the same folder."""
    source = Path(policy_package.__file__).parent
    target = folder / "policy"
    shutil.rmtree(target, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target, ignore=ignored)
