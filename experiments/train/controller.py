"""The controller experiment: train with several seeds, judge beside every simple way."""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
import torch
from threadpoolctl import threadpool_limits

from knobwise.agents.checkpoint import Loaded, load_checkpoint, load_if_whole
from knobwise.agents.controller.controller import Controller
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, StaticPerDataset, make_baselines
from knobwise.agents.predictors.experts import Experts
from knobwise.agents.predictors.regressors import FAMILIES
from knobwise.agents.serving import numpy_controller
from knobwise.agents.serving.distillation import StudentConfig, student_of
from knobwise.agents.serving.export import export_numpy
from knobwise.agents.serving.own_cost import expected_cost_ms
from knobwise.agents.stack.priced_policy import PricedChooser, make_priced_baselines, price_stack, taught
from knobwise.agents.stack.prices import mean_budgets
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.common.errors import InputError
from knobwise.envs.configurations.budgets import few_budgets, judged_budgets
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.readers.joint import rows_by_dataset, with_dataset_input
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.envs.tables.splits import budget_rows, divide
from knobwise.experiments.results.controllers import held_out_choices, judge_deadlines, judge_mean_budgets, over_splits
from knobwise.experiments.results.explanation import Explained, explain_policy
from knobwise.experiments.results.fronts import judge_fronts
from knobwise.experiments.results.run_folder import STUDENT, checkpoint_at
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.profiles import read_profile, read_questions
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.experiments.train.run import Experiment, keep_best, train_seeds

STUDENT_STEPS, LEAST_STUDENT_STEPS = 3, 200
"""Steps of a student's fit for each iteration of its teacher's training, and at least in all."""


class ControllerExperiment(Experiment):
    """The trainings of all seeds, all set up before the first is run: what is wrong shows before anything is
    written.

    Args:
        table: what they are trained on; None to read it as `config.profile` says.
        number: of the split, counted from 0. Those after the first are experiments of their own, `others`.
    """

    def __init__(self, config: TrainRun, table: ProfileTable | None = None, number: int = 0) -> None:
        super().__init__(config, config.threads)
        table = read_profile(config.profile) if table is None else table
        if config.policy.dataset_input and not number:
            table = with_dataset_input(table)
        self.table, self.number = table, number
        self.notes = [f"{table.name}: {note}" for note in table.notes]
        self.split = divide(table, **asdict(config.split), number=number)
        self.fitted = torch.cat([self.split.train, self.split.validation])
        self.mean, self.weighs = (config.budget.sense == sense for sense in ("mean", "weights"))
        # a guard would hold the policy to utility
        guarded = config.reward.kind != "function" and not self.weighs
        self.stacked = guarded and config.policy.structure == "utility" and config.policy.members > 1
        if self.mean and not self.stacked:
            raise InputError("budget=mean: needs policy.structure=utility and policy.members of at least 2")
        if self.weighs and config.policy.structure != "utility":
            raise InputError("budget=weights: needs policy.structure=utility, which predicts costs")
        if self.weighs and config.budgets_ms is not None:
            raise InputError("budgets_ms: is for budget=mean and deadlines; weights are judged at a grid of worths")
        if self.mean or self.weighs:
            sense = f"budget={config.budget.sense}"
            if table.first_look_ms is not None:
                raise InputError(f"{sense}: profile {table.name!r} has a first look, which needs deadlines")
            several = "folds" if config.split.folds else "repeats"
            if getattr(config.split, several) > 1:
                problem = f"is for deadlines; under {sense} there is one split"
                raise InputError(f"split.{several}: {problem}")
            config.reward = RewardConfig(kind="priced")  # so that config.yaml says what was trained on
        if self.weighs:
            self.notes += ["budget=weights: the network decides alone, without experts"] * bool(config.policy.experts)
            config.policy.experts, config.policy.guard, self.budgets_ms = (), False, torch.zeros(0)
        elif self.mean:
            self.budgets_ms = mean_budgets(table, self.fitted, config.budgets_ms)
        else:
            self.budgets_ms = judged_budgets(table, config.budgets_ms, budget_rows(table, self.split))
        self.notes += few_budgets(self.budgets_ms) if config.budgets_ms is None and not self.weighs else []
        names = ("policy", "loss", "optimiser", "budget", "reward", "balance", "device")
        settings = {name: getattr(config, name) for name in names}
        settings["budgets_ms"] = self.budgets_ms
        settings["init_from"] = config.init_from and checkpoint_at(config.init_from, "teacher")
        self.trainers = [ControllerTrainer(table, self.split, seed=seed, **settings) for seed in config.seeds]
        splits = 1 if number else max(config.split.repeats, config.split.folds)
        self.others = [self._on_split(other) for other in range(1, splits)]
        self.notes += [note for other in self.others for note in other.notes if note not in self.notes]

    def _on_split(self, number: int) -> ControllerExperiment:
        """The same on another split, at the same budgets, so that rows can be averaged."""
        config = copy.deepcopy(self.config)
        config.budgets_ms = self.budgets_ms.tolist()
        config.tracking = TrackingSettings(mode="disabled", tensorboard=False)
        return ControllerExperiment(config, self.table, number)

    def train(self, folder: Path) -> None:
        """Train every seed that is not finished, on one split after the other; those after the first have folders like
        that of a run."""
        for trainer in self.trainers:
            if self.number:
                trainer.title = f"split {self.number}, {trainer.title}"
        train_seeds(self.trainers, self.config, folder, self.complete)
        for other in self.others:
            other.train(folder / f"split{other.number}")

    def complete(self, trainer: ControllerTrainer, checkpoints: Path) -> None:
        """Turn what a seed has trained into what it deploys."""
        loaded = load_checkpoint(best := checkpoints / "best.pt")
        if isinstance(loaded.agent, Controller):  # else it was completed before a stop
            loaded = self.completed(trainer, loaded.agent)
            loaded.save(best)
        student = checkpoints / STUDENT
        if load_if_whole(student) is None and (deployed := self.deployed(loaded, trainer.seed)) is not loaded:
            deployed.save(student)

    @cached_property
    def experts(self) -> Experts:
        """What the seeds and the baselines share; folds and trees are those of the first seed of the split."""
        config, budgets_ms = self.config, self.budgets_ms[:0] if self.mean else self.budgets_ms
        families = tuple(FAMILIES) if config.baselines else config.policy.experts
        return Experts.fit(self.table, self.fitted, budgets_ms, families, config.seeds[0] + self.number)

    @property
    def _taught(self) -> bool:
        """Whether a student is deployed, or the policy itself (`policy.deploy`)."""
        return self.stacked and self.config.policy.deploy == "auto"

    @property
    def expected_cost_ms(self) -> float:
        """What a decision of the deployed policy is expected to take from each budget."""
        slow = bool(self.config.policy.experts) and not self._taught
        return expected_cost_ms(self.table, slow) if self.config.own_cost else 0.0

    def completed(self, trainer: ControllerTrainer, network: Controller) -> Loaded:
        """What a training ends in, from its best network: experts and a guard around an ensemble that predicts
        outcomes, and under mean budgets the price of each. Any other network stays as it is."""
        table, policy, limits, seed = self.table, self.config.policy, trainer.limits, trainer.fold_seed
        done: Controller | StackedController | PricedChooser = network
        about = table, self.fitted, network, policy, limits
        with threadpool_limits(self.config.threads):
            experts = None if policy.project else self.experts  # baselines read all features
            if self.mean:
                done = price_stack(*about, self.budgets_ms, seed, self.expected_cost_ms, experts)
            elif self.stacked:
                done = fit_stack(*about, seed, self.expected_cost_ms, experts)
        extra = trainer.provenance()
        if isinstance(stack := getattr(done, "chooser", done), StackedController):
            extra["validation_utility"] = stack.held_out_worth
        return Loaded(done, table.name, table.digest, extra)

    def deployed(self, loaded: Loaded, seed: int) -> Loaded:
        """What is deployed of a completed training: a student of it, or the policy itself."""
        if not self._taught:
            return loaded
        agent, table, rows, optimiser = loaded.agent, self.table, self.fitted, self.config.optimiser
        stack = agent.chooser if isinstance(agent, PricedChooser) else agent
        assert isinstance(stack, StackedController)
        steps = max(STUDENT_STEPS * (optimiser.warmup_iterations + optimiser.iterations), LEAST_STUDENT_STEPS)
        with threadpool_limits(self.config.threads):
            student: Any = student_of(stack, table, rows, seed, StudentConfig(steps=steps))
            if isinstance(agent, PricedChooser):
                student = taught(agent, student, table, rows, self.expected_cost_ms)
        return loaded._replace(agent=student, extra=dict(loaded.extra))

    def judge(self, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
        """Every seed's best controller, what is deployed of it, and the baselines on the test part of each split."""
        folders = [folder / "checkpoints" / f"seed{seed}" for seed in self.config.seeds]
        best = [load_checkpoint(each / "best.pt") for each in folders]
        students = [each / STUDENT for each in folders if (each / STUDENT).exists()]
        results, decisions = self.judged(best, list(map(load_checkpoint, students)) or best)
        keep_best(folder, dict(zip(folders, results["validation_utility"], strict=True)))
        kept = load_checkpoint(folder / "checkpoints" / (STUDENT if students else "best.pt")).controller
        if not self.mean and not self.weighs:
            export_numpy(kept, folder / "controller.npz")
            shutil.copy(numpy_controller.__file__, folder)
        if not self.number and not self.weighs:
            with threadpool_limits(self.config.threads):
                explained = Explained(self.table, self.fitted, self.split.test, kept, self.budgets_ms)
                results["explanation"] = explain_policy(explained, read_questions(self.config.profile))
        if self.others:
            frames = [decisions, *(other.judge(folder / f"split{other.number}")[1] for other in self.others)]
            tests = [part.split.test for part in (self, *self.others)]
            over, decisions = over_splits(self.table, tests, self.config.seeds, frames)
            config = self.config.split
            seeds = [config.seed] * config.folds or range(config.seed, config.seed + config.repeats)
            results |= over | {"split_seeds": list(seeds)}
        return results, decisions

    def judged(self, best: list[Loaded], deployed: list[Loaded]) -> tuple[dict[str, Any], pl.DataFrame]:
        """The contents of `results.json` and of `decisions.parquet`: what all seeds deploy, its teachers where these
        are something else, and baselines."""
        config, scores = self.config, [float(loaded.extra["validation_utility"]) for loaded in best]
        teachers = [teacher.controller for each, teacher in zip(deployed, best, strict=True) if each is not teacher]
        with threadpool_limits(config.threads):
            results, decisions = self._judged([loaded.controller for loaded in deployed], teachers)
        results |= held_out_choices(best)
        results["validation_utility"], results["best_seed"] = scores, config.seeds[scores.index(max(scores))]
        iterations = config.optimiser.iterations
        first = self.trainers[0]
        results["training"] = {"warmup_iterations": first.total - iterations, "iterations": iterations}
        results["training"]["method"] = first.stages[-1].name
        return results, decisions

    def _judged(self, controllers: list[Any], teachers: list[Any]) -> tuple[dict[str, Any], pl.DataFrame]:
        config, table, split, budgets_ms = self.config, self.table, self.split, self.budgets_ms
        fitted, test, seeds = self.fitted, split.test, config.seeds
        baselines: list[Any] = []
        if self.weighs:
            return judge_fronts(table, fitted, test, controllers, seeds, config.own_cost)
        if self.mean:
            if config.baselines:
                baselines = make_priced_baselines(table, split, budgets_ms, experts=self.experts)
            return judge_mean_budgets(table, fitted, test, budgets_ms, controllers, seeds, baselines, config.own_cost)
        if config.baselines:
            baselines = make_baselines(table, split, seeds[0] + self.number, budgets_ms, self.experts)
            if len(rows_by_dataset(table, test)) > 1:
                baselines.insert(1, StaticPerDataset(table, fitted, test))
        else:
            baselines = [BudgetAwareStatic(table, fitted), Oracle(table, test)]
        rewards = self.trainers[0].env.rewards
        return judge_deadlines(
            table, test, budgets_ms, rewards, controllers, seeds, baselines, config.own_cost, teachers
        )
