"""The controller experiment: train with several seeds, judge beside every simple policy."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import polars as pl
import torch
from threadpoolctl import threadpool_limits

from knobwise.agents import deployed as policy_package
from knobwise.agents.calibration.calibrate import calibrate_controller
from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.calibration.mean_policies import MixingPolicy
from knobwise.agents.calibration.training import (
    best_is_of_grpo,
    distillation_trainer,
    gained_by_sample,
)
from knobwise.agents.calibration.ways import WAYS
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import hidden_for
from knobwise.agents.deployed.text import TextEncoder
from knobwise.agents.evaluation.budgets import few_budgets
from knobwise.agents.evaluation.own_cost import expected_cost_ms
from knobwise.agents.evaluation.policy import Baseline
from knobwise.agents.evaluation.problems import problem_of
from knobwise.agents.evaluation.texts import encoded_by, fit_encoders
from knobwise.agents.teacher.experts import Experts, sampled
from knobwise.agents.teacher.regressors import FAMILIES
from knobwise.agents.training.checkpoint import Loaded, load_checkpoint
from knobwise.agents.training.trainer import Trainer
from knobwise.common.progress import progress, say
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.readers.joint import with_dataset_input
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.divisions import divide
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import FOLDS
from knobwise.envs.tables.units import MS
from knobwise.experiments.evidence.controllers import (
    controller_results,
    evaluate_controllers,
    evaluator_of,
    gain_on_held_out,
    held_out_choices,
    validation_scores,
)
from knobwise.experiments.evidence.evaluate import Deadlines, judged_part
from knobwise.experiments.evidence.explanation import Explained, explain_policy
from knobwise.experiments.evidence.mean_budgets import MeanBudgets
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.evidence.schema import Attainable, GrpoGain, RunResults, TrainingFacts
from knobwise.experiments.inspection.attainable import add_shares, attainable_by
from knobwise.experiments.inspection.checks import warnings_of
from knobwise.experiments.settings.options import EvaluateRun, TrainRun, resolve
from knobwise.experiments.settings.profiles import read_profile, read_questions
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train.run import Experiment, keep_best, run_logged, seed_folder


class ControllerExperiment(Experiment):
    """The trainings of all seeds. All are set up before the first begins, so that mistakes show
    before anything is written.

    Args:
        table: the profile to train on; None to read it as `config.profile` says.
        number: the number of the split, counted from 0. Splits after the first are experiments
            of their own, in `others`.
    """

    config: TrainRun
    table: ProfileTable

    def __init__(
        self, config: TrainRun, table: ProfileTable | None = None, number: int = 0
    ) -> None:
        super().__init__(resolve(config), config.threads)
        if table is None:
            table = read_profile(config.profile)
        if config.policy.dataset_input and not number:
            table = with_dataset_input(table)
        self.number = number
        split = divide(table, **asdict(config.split), number=number)
        self.split = judged_part(split)
        # what a large table is sampled for: how many samples are used, and how many there are
        self.sampled = {"test": [len(self.split.test), len(split.test)]}
        self.unencoded = table
        encoders = self._encoders()
        if encoders is None:
            encoders = fit_encoders(table, self.split, config.chat)
        table = encoded_by(table, encoders)
        # notes of one of several data sets name it
        name = f"{table.name}: "
        self.notes = [name + note.removeprefix(name) for note in table.notes]
        self.warnings: list[str] = []
        if not number:
            self.warnings = warnings_of(table)
            self.notes += self.warnings
            if table.unit != MS:
                self.notes.append(
                    f"budgets are in {table.unit}, not a time, so decisions and features "
                    "(profile.features_ms) are not charged"
                )
        # folds differ from split to split
        self.fold_seed = config.seeds[0] + number
        self.table = table
        self.problem = problem_of(table, self.split, config.budget, config.unprofiled, encoders)
        # what everything but the trainers is fitted on
        self.fitted = self.split.fitted
        if config.policy.experts or config.baselines:
            kept = sampled(len(self.fitted), table.num_configurations)
            self.sampled["experts"] = [len(kept), len(self.fitted)]
        ways = WAYS[self.problem.rule.kind]
        ways.check(table, max(config.split.folds, config.split.repeats))
        # the budgets to judge at, float [B]
        self.budgets_ms = ways.budgets(self.problem, config.budgets_ms)
        if self.problem.rule.is_own and not number:
            self.notes.append(f"utility is what the rule {self.problem.rule.words} says")
        if config.budgets_ms is None:
            self.notes += [in_words(note, table.unit) for note in few_budgets(self.budgets_ms)]
        # config.yaml says how wide the layers became
        policy = replace(config.policy, hidden=config.policy.hidden or self._width())
        self.config = replace(self.config, policy=policy)
        self.trainers = [self._trainer(seed) for seed in config.seeds]
        self.notes += self._notes_on_settings()
        # the first split makes the experiments on the others
        self.others: list[ControllerExperiment] = []
        if not number:
            splits = max(config.split.repeats, config.split.folds)
            self.others = [self._on_split(other) for other in range(1, splits)]
        for other in self.others:
            self.notes += [note for note in other.notes if note not in self.notes]

    def _notes_on_settings(self) -> list[str]:
        """Return what settings have no effect here, or another than a user may think."""
        notes = []
        setup = self.trainers[0].setup
        augment = self.config.policy.augment
        if augment and not setup.augment:
            notes.append(
                f"policy.augment={augment} has no effect: profile {self.table.name!r} has no "
                "features, or too many cells to copy"
            )
        kind = self.config.reward.kind
        if setup.distiller is not None and not KINDS[kind].learned_by_teacher:
            notes.append(
                f"reward={kind}: only GRPO optimises it. The teacher predicts utility, and "
                f"loss.kl_to_ref_coeff ({setup.kl_coeff:g}) keeps GRPO near the distilled policy; "
                "policy=independent learns this reward alone"
            )
        return notes

    def _trainer(self, seed: int) -> Trainer:
        """Return the trainer of a seed."""
        config = self.config

        def fitted_experts() -> Experts:
            return self.experts

        experts: Callable[[], Experts] | None = fitted_experts
        if config.policy.project:  # experts read all features
            experts = None
        return distillation_trainer(
            self.problem,
            seed=seed,
            budgets_ms=self.budgets_ms,
            init_from=config.init_from and checkpoint_at(config.init_from),
            cost_ms=expected_cost_ms(self.table) if config.own_cost else 0.0,
            fold_seed=self.fold_seed,
            experts=experts,
            policy=config.policy,
            loss=config.loss,
            optimiser=config.optimiser,
            budget=config.budget,
            reward=config.reward,
            balance=config.balance,
            device=config.device,
        )

    def _encoders(self) -> Mapping[str, TextEncoder] | None:
        """Return what encodes texts for the weights to start from; None if there are none, so that
        it is fitted."""
        if not self.config.init_from:
            return None
        # the weights know what these numbers mean
        start = load_checkpoint(checkpoint_at(self.config.init_from))
        return start.controller.decider.texts or None

    def _on_split(self, number: int) -> ControllerExperiment:
        """Return the experiment on another split, at the same budgets, so that rows can be
        averaged."""
        tracking = TrackingSettings(mode="disabled", tensorboard=False)
        config = replace(self.config, budgets_ms=self.budgets_ms.tolist(), tracking=tracking)
        return ControllerExperiment(config, self.unencoded, number)

    def train(self, folder: Path) -> None:
        """Train every seed that is not finished, on one split after the other. Splits after the
        first have folders inside that of the run."""
        with progress("seeds", len(self.trainers)) as tick:
            for done, trainer in enumerate(self.trainers, 1):
                if self.number:
                    trainer.title = f"split {self.number}, {trainer.title}"
                trainer.folder = seed_folder(folder, trainer.seed)
                trainer.resume(trainer.folder / "last.pt")
                run_logged(trainer, self.config, folder, self.table)
                say(best_of(trainer))
                best = trainer.folder / "best.pt"
                # else an earlier process completed it
                if "before_grpo" not in load_checkpoint(best).extra:
                    self.completed(trainer).save(best)
                tick(done)
        for other in self.others:
            other.train(folder / f"split{other.number}")

    def _width(self) -> int:
        """Return the width of the layers that suits the smallest budget."""
        table = self.table
        inputs = FeatureNormaliser.fit(table, self.fitted, self.config.policy.project).width
        # without budgets in ms the widest layers will do
        budget_us = float("inf")
        if table.unit == MS and len(self.budgets_ms):
            budget_us = 1e3 * float(self.budgets_ms.min())
        utility_head = self.config.policy.utility_head
        return hidden_for(inputs, table.num_configurations, utility_head, budget_us)

    @cached_property
    def experts(self) -> Experts:
        """The experts that the seeds and the baselines share. Folds and trees are those of the
        first seed of the split."""
        policy = self.config.policy
        budgets_ms = self.problem.rule.deadlines(self.budgets_ms)
        families = tuple(FAMILIES) if self.config.baselines else policy.experts
        folds = policy.fold_networks if policy.teacher else FOLDS
        return Experts.fit(
            self.table,
            self.fitted,
            budgets_ms,
            families,
            self.fold_seed,
            folds=folds,
            rule=self.problem.rule,
        )

    def completed(self, trainer: Trainer) -> Loaded:
        """Return the controller that a finished training deploys, after its calibration."""
        # a finished training that was resumed holds its last weights, not its best
        trainer.agent.load_state_dict(trainer.state.best.state)
        with threadpool_limits(self.config.threads):
            agent = calibrate_controller(trainer.setup, self.budgets_ms)
        extra = trainer.provenance(trainer)
        extra["grpo"] = {}
        extra["before_grpo"] = None
        # what predictions say of held-out samples is no evidence
        if self.problem.beliefs is None:
            extra["grpo_held_out"] = gained_by_sample(trainer)
        scores = trainer.stages[-1].scores_before
        if scores is not None:
            extra["grpo"] = {"start": float(scores.mean())}
            # where the kept weights are from before GRPO, it added nothing
            before = agent.controller
            if best_is_of_grpo(trainer):
                before = trainer.setup.reference
            extra["before_grpo"] = before.state_dict()
        return Loaded(agent, self.table.name, self.table.digest, extra)

    def evaluate(self, folder: Path) -> tuple[RunResults, pl.DataFrame]:
        """Judge every seed's best controller as it is deployed, and the baselines, on the test part
        of each split."""
        folders = [seed_folder(folder, seed) for seed in self.config.seeds]
        best = [load_checkpoint(checkpoints / "best.pt") for checkpoints in folders]
        results, decisions = self.judged(best)
        # the seed that was best on validation is deployed
        scores = [float(loaded.extra["validation_utility"]) for loaded in best]
        keep_best(folder, dict(zip(folders, scores, strict=True)))
        kept = load_checkpoint(folder / "checkpoints" / "best.pt").controller
        kept.export(folder / "controller.npz")
        copy_policy(folder)
        if not self.number:
            test = self.split.test
            if part := {name: used for name, used in self.sampled.items() if used[0] < used[1]}:
                results["sampled"] = part
            results["warnings"] = self.warnings
            questions = read_questions(self.config.profile)
            with threadpool_limits(self.config.threads):
                evaluator = evaluator_of(self.problem, self.budgets_ms)
                budgets_ms, static, prices = evaluator.explained_by(kept)
                explained = Explained(self.problem, test, kept, budgets_ms, static, prices=prices)
                results["explanation"] = explain_policy(explained, questions)
        if self.others:
            # every row is a mean over the splits; a sample counts once for each that judges it
            frames = [decisions.with_columns(split=pl.lit(0, pl.Int64))]
            for other in self.others:
                _, judged = other.evaluate(folder / f"split{other.number}")
                frames.append(judged.with_columns(split=pl.lit(other.number, pl.Int64)))
            decisions = pl.concat(frames)
            tests = torch.cat([part.split.test for part in (self, *self.others)])
            whole = evaluator_of(self.problem.judged_on(tests), self.budgets_ms)
            means = controller_results(whole, decisions, self.config.seeds)
            split = self.config.split
            # folds share one seed
            seeds = [split.seed] * split.folds or range(split.seed, split.seed + split.repeats)
            results |= means | {"split_seeds": list(seeds)}
            add_shares(results)
        return results, decisions

    def judged(self, best: list[Loaded]) -> tuple[RunResults, pl.DataFrame]:
        """Return the contents of `results.json` and of `decisions.parquet`.

        They hold what all seeds deploy, its teachers, and the baselines.

        Args:
            best: the best checkpoint of each seed.
        """
        config = self.config
        scores = [float(loaded.extra["validation_utility"]) for loaded in best]
        controllers = [loaded.controller for loaded in best]
        before = [before_grpo(loaded) for loaded in best]
        # the column of rewards is free of the decision's own cost
        free_rewards = self.trainers[0].setup.held_out.free_rewards
        evaluator = evaluator_of(self.problem, self.budgets_ms, free_rewards)
        experts = self.experts if config.baselines else None
        with threadpool_limits(config.threads):
            results, decisions = evaluate_beside_baselines(
                evaluator, config, controllers, config.seeds, experts, self.fold_seed, before
            )
        gain: GrpoGain = results.pop("grpo_gain", {})
        gain |= gain_on_held_out(best)
        if gain:
            results["grpo_gain"] = gain
        first = self.trainers[0]
        iterations = config.optimiser.iterations
        # the stages before GRPO: the teacher's and the warm-up
        training: TrainingFacts = {
            "warmup_iterations": first.total - iterations,
            "iterations": iterations,
            "method": first.stages[-1].name,
            "hidden": config.policy.hidden,
            # the iterations without a better score after which it stops, and where each seed ended
            "patience": patience_of(first),
            "ended_at": [trainer.state.iteration for trainer in self.trainers],
        }
        if config.loss.is_own:
            training["loss"] = config.loss.objective
            training["loss_settings"] = dict(config.loss.settings or {})
        results |= held_out_choices(best) | validation_scores(best)
        results |= {
            "best_seed": config.seeds[scores.index(max(scores))],
            "training": training,
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
        if evaluator.task.charged and table.features:
            estimate = attainable_by(evaluator.problem, experts, evaluator.budgets_ms)
        baselines = evaluator.baselines(experts, fold_seed)
    results, decisions = evaluate_controllers(
        evaluator, controllers, seeds, baselines, config.own_cost, before
    )
    if estimate:
        results["attainable"] = estimate
        add_shares(results)
    return results, decisions


def best_of(trainer: Trainer) -> str:
    """Return a line with the best validation score of a trainer, and when it was reached."""
    state = trainer.state
    iteration = state.best.iteration
    line = (
        f"{trainer.title}: best validation {trainer.judged_by} {state.best.score:.4f} at "
        f"iteration {iteration} of {trainer.total}"
    )
    last = trainer.stages[-1]
    if last.iterations:
        when = "before" if iteration <= trainer.total - last.iterations else "during"
        line += f" ({when} {last.name})"
    if state.iteration < trainer.total:
        line += (
            f"; training stopped at iteration {state.iteration}, after "
            f"{patience_of(trainer)} iterations of {last.name} without a better one "
            f"(optimiser.patience={trainer.settings.patience})"
        )
    return line


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


def patience_of(trainer: Trainer) -> int:
    """Return after how many iterations without a better score the last stage ends; 0 for never."""
    return trainer.stages[-1].patience * trainer.settings.evaluate_every
