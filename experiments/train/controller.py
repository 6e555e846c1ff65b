"""The controller experiment: settings → problem → networks → training, for every seed and split."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from torch import Tensor

from knobwise.agents.calibration.guard import are_gains_known
from knobwise.agents.controller.features import FeatureNormaliser
from knobwise.agents.controller.settings import PolicyConfig, hidden_for
from knobwise.agents.evaluation.own_cost import expected_cost_ms
from knobwise.agents.problem import Problem
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.agents.training.controllers import controller_trainer
from knobwise.agents.training.trainer import Trainer
from knobwise.common.progress import progress, say
from knobwise.envs.bandit.budgets import few_budgets
from knobwise.envs.bandit.reward_kinds import KINDS
from knobwise.envs.tables.cost_words import in_words
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import FOLDS
from knobwise.envs.tables.units import MS
from knobwise.experiments.evidence.run_folder import checkpoint_at
from knobwise.experiments.evidence.schema import RunResults
from knobwise.experiments.inspection.checks import warnings_of
from knobwise.experiments.settings.options import TrainRun, resolve_training
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train.problems import facts_of_run, problem_of_run
from knobwise.experiments.train.run import (
    Experiment,
    patience_of,
    run_logged,
    seed_folder,
    split_folder,
)

if TYPE_CHECKING:
    from knobwise.agents.teacher.experts import Experts


class SplitTraining:
    """The trainings of all seeds on one split.

    Args:
        config: the settings of the run.
        problem: what the controllers learn.
        budgets_ms: to judge at, float [B].
        number: of the split, counted from 0.
    """

    def __init__(
        self, config: TrainRun, problem: Problem, budgets_ms: Tensor, number: int = 0
    ) -> None:
        self.config = config
        self.problem = problem
        self.budgets_ms = budgets_ms
        self.number = number
        # folds differ from split to split
        self.fold_seed = config.seeds[0] + number
        self.trainers = [self._trainer(seed) for seed in config.seeds]

    def _trainer(self, seed: int) -> Trainer:
        """Return the trainer of a seed."""
        config = self.config
        settings: dict[str, Any] = {
            "seed": seed,
            "budgets_ms": self.budgets_ms,
            "init_from": config.init_from and checkpoint_at(config.init_from),
            "cost_ms": expected_cost_ms(self.problem.facts) if config.own_cost else 0.0,
            "fold_seed": self.fold_seed,
            "policy": config.policy,
            "loss": config.loss,
            "optimiser": config.optimiser,
            "budget": config.budget,
            "reward": config.reward,
            "balance": config.balance,
            "device": config.device,
        }
        if not config.policy.teacher:
            return controller_trainer(self.problem, **settings)
        # what teaches takes long to import
        from knobwise.agents.calibration.training import distillation_trainer

        if not config.policy.project:  # experts read all features
            settings["experts"] = lambda: self.experts
        return distillation_trainer(self.problem, **settings)

    @cached_property
    def experts(self) -> Experts:
        """The experts that the seeds and the baselines share. Folds and trees are those of the
        first seed of the split."""
        from knobwise.agents.teacher.experts import Experts
        from knobwise.agents.teacher.regressors import FAMILIES

        policy = self.config.policy
        budgets_ms = self.problem.rule.deadlines(self.budgets_ms)
        families = tuple(FAMILIES) if self.config.baselines else policy.experts
        folds = policy.fold_networks if policy.teacher else FOLDS
        fitted = self.problem.split.fitted
        return Experts.fit(
            self.problem.facts,
            fitted,
            budgets_ms,
            families,
            self.fold_seed,
            folds=folds,
            rule=self.problem.rule,
        )

    def train(self, folder: Path) -> None:
        """Train every seed that is not finished; checkpoints go into `checkpoints/seed<k>`."""
        with progress("seeds", len(self.trainers)) as tick:
            for done, trainer in enumerate(self.trainers, 1):
                if self.number:
                    trainer.title = f"split {self.number}, {trainer.title}"
                trainer.folder = seed_folder(folder, trainer.seed)
                trainer.resume(trainer.folder / "last.pt")
                run_logged(trainer, self.config, folder, self.problem.facts)
                best = trainer.folder / "best.pt"
                loaded = load_checkpoint(best)
                # else an earlier process calibrated it
                if "before_grpo" not in loaded.extra:
                    from knobwise.experiments.train.judging import calibrate_trained

                    loaded = calibrate_trained(self, trainer)
                    loaded.save(best)
                say(best_of(trainer, are_gains_known(loaded.controller.calibration.guard)))
                tick(done)


class ControllerExperiment(Experiment):
    """The trainings of a controller on every split of a profile.

    Args:
        config: the settings.
        table: the profile to train on; None to read it as `config.profile` says.

    Attributes:
        splits: what is trained, by split; that of the first split is deployed.
        warnings: what the inspection of the profile found.
    """

    config: TrainRun
    table: ProfileTable

    def __init__(self, config: TrainRun, table: ProfileTable | None = None) -> None:
        super().__init__(resolve_training(config), config.threads)
        self.unread = table
        self.splits: list[SplitTraining] = []

    def prepare(self) -> None:
        """See `Experiment`: read the profile, inspect it, and make all networks."""
        facts = facts_of_run(self.config, self.unread)
        problem = problem_of_run(self.config, facts)
        self.table = problem.facts
        self.warnings = warnings_of(self.table)
        self.notes = self._notes_on_table()
        count = max(self.config.split.folds, self.config.split.repeats, 1)
        problem.rule.check(self.table, count)
        budgets_ms = problem.budgets(self.config.budgets_ms)
        if problem.rule.is_own:
            self.notes.append(f"utility is what the rule {problem.rule.words} says")
        if self.config.budgets_ms is None:
            self.notes += [in_words(note, self.table.unit) for note in few_budgets(budgets_ms)]
        # config.yaml says how wide the layers became
        policy = self.config.policy
        policy = replace(policy, hidden=policy.hidden or width_for(problem, budgets_ms, policy))
        self.config = replace(self.config, policy=policy)
        self.splits = [SplitTraining(self.config, problem, budgets_ms)]
        self.notes += self._notes_on_settings()
        # the others are judged at the same budgets, so that rows can be averaged
        tracking = TrackingSettings(mode="disabled", tensorboard=False)
        config = replace(self.config, budgets_ms=budgets_ms.tolist(), tracking=tracking)
        for number in range(1, count):
            problem = problem_of_run(config, facts, number)
            training = SplitTraining(config, problem, problem.budgets(config.budgets_ms), number)
            self.splits.append(training)

    def train(self, folder: Path) -> None:
        """See `Experiment`; splits after the first have folders of their own."""
        for split in self.splits:
            split.train(split_folder(folder, split.number))

    def evaluate(self, folder: Path) -> tuple[RunResults, pl.DataFrame]:
        """Judge every seed's best controller as it is deployed, and the baselines, on the test part
        of each split."""
        # what judges is imported when there is something to judge
        from knobwise.experiments.train.judging import judge_run

        return judge_run(self, folder)

    def _notes_on_table(self) -> list[str]:
        """Return what the readers noted and the inspection found."""
        table = self.table
        # notes of one of several data sets name it
        name = f"{table.name}: "
        notes = [name + note.removeprefix(name) for note in table.notes] + self.warnings
        if table.unit != MS:
            notes.append(
                f"budgets are in {table.unit}, not a time, so decisions and features "
                "(profile.features_ms) are not charged"
            )
        return notes

    def _notes_on_settings(self) -> list[str]:
        """Return what settings have no effect here, or another than a user may think."""
        notes = []
        setup = self.splits[0].trainers[0].setup
        augment = self.config.policy.augment
        if augment and not setup.augment:
            notes.append(
                f"policy.augment={augment} has no effect: profile {self.table.name!r} has no "
                "features"
            )
        kind = self.config.reward.kind
        if setup.distiller is not None and not KINDS[kind].learned_by_teacher:
            notes.append(
                f"reward={kind}: only GRPO optimises it. The teacher predicts utility, and "
                f"loss.kl_to_ref_coeff ({setup.kl_coeff:g}) keeps GRPO near the distilled policy; "
                "policy=independent learns this reward alone"
            )
        return notes


def width_for(problem: Problem, budgets_ms: Tensor, policy: PolicyConfig) -> int:
    """Return the width of the layers that suits the smallest budget, of [B]."""
    table = problem.facts
    inputs = FeatureNormaliser.fit(table, problem.split.fitted, policy.project).width
    # without budgets in ms the widest layers will do
    budget_us = float("inf")
    if table.unit == MS and len(budgets_ms):
        budget_us = 1e3 * float(budgets_ms.min())
    return hidden_for(inputs, table.num_configurations, policy.utility_head, budget_us)


def best_of(trainer: Trainer, known: bool = True) -> str:
    """Return a line with the validation score of the kept weights, and when it was reached.

    Args:
        known: False where the score is of predictions, which say nothing.
    """
    state = trainer.state
    iteration, keep = state.best.iteration, trainer.settings.keep
    score = f"{state.best.score:.4f}" if known else "(by predictions, so not known)"
    line = (
        f"{trainer.title}: {keep} validation {trainer.judged_by} {score} at "
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
