"""The controller experiment: train with several seeds, judge beside every simple way, report.

Launch it as `python experiments/train/controller.py key=value …` or `knobwise train experiment=controller key=value …`.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.checkpoint import Loaded, load_checkpoint, save_checkpoint
from knobwise.agents.controller.controller import Controller
from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, make_baselines
from knobwise.agents.stack.priced_policy import PricedChooser, make_priced_baselines, price_controller, price_stack
from knobwise.agents.stack.prices import judged_mean_budgets
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import PolicyConfig, at_least
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import say
from knobwise.envs.configurations.budgets import judged_budgets
from knobwise.envs.configurations.reward import RewardConfig
from knobwise.envs.readers.joint import rows_by_dataset
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import budget_rows, divide
from knobwise.experiments.report.report import print_results, result_images, write_report
from knobwise.experiments.results.by_dataset import StaticPerDataset
from knobwise.experiments.results.decisions_file import write_decisions
from knobwise.experiments.results.mean_results import mean_decisions_of, mean_results_of, outcomes_of
from knobwise.experiments.results.results import decisions_of, held_out_choices, judge_policies, profile_of, results_of
from knobwise.experiments.results.run_folder import claim
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.tracking.tracker import Tracker, wandb_mode


def run(config: TrainRun, overrides: list[str]) -> Path:
    """The whole way once, from a profile to a report; returns the run's folder.

    A run that was stopped goes on where it was when it is started again with the same settings.

    Args:
        config: the settings.
        overrides: the words of the command line, for the run's name.

    Raises:
        InputError: settings or files that cannot be used; nothing has been written then.
    """
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    at_least("threads", config.threads, 1)
    torch.set_num_threads(config.threads)
    wandb_mode(config.tracking)
    table = read_profile(config.profile)
    split = divide(table, **asdict(config.split))
    fitted = torch.cat([split.train, split.validation])
    mean = config.budget.sense == "mean"
    if mean:
        config.reward = RewardConfig(kind="priced")  # so that config.yaml says what was trained on
    budgets_ms = (
        judged_mean_budgets(table, fitted, config.budgets_ms)
        if mean
        else judged_budgets(table, config.budgets_ms, budget_rows(table, split))
    )
    # all trainers before the first is run: what is wrong shows before anything is written
    trainers = _trainers(config, table, split, budgets_ms)
    for note in table.notes:
        say(f"{table.name}: {note}")

    with claim(config, overrides) as folder:
        say(f"run: {folder}")
        _train(config, table, trainers, folder, budgets_ms)
        best, scores = _keep_best(folder, config.seeds)
        say("judging every policy on the test split …")
        with threadpool_limits(config.threads):
            judge_run = _judged_by_means if mean else _judged_by_deadlines
            results, decisions = judge_run(
                config, table, split, budgets_ms, trainers[0], [one.controller for one in best]
            )
        results |= held_out_choices(best)
        results["experiment"], results["validation_utility"] = config.experiment, scores
        results["best_seed"] = config.seeds[scores.index(max(scores))]
        results["training"] = {n: getattr(config.optimiser, n) for n in ("warmup_iterations", "iterations")}
        results["command"] = " ".join(["knobwise train", *map(shlex.quote, overrides)])
        with written_whole(folder / "results.json") as temporary:
            temporary.write_text(json.dumps(results, indent=1))
        write_decisions(folder, decisions)
        report = write_report(folder)
        with _tracker(config, table, folder, "evaluate") as tracker:
            shown = tracker.mode != "disabled"  # pictures take longer to draw than all else here
            tracker.log_results(results, images=result_images(results) if shown else None)
    print_results(results, Console())
    print(f"report: {report}")
    return folder


def _train(
    config: TrainRun, table: ProfileTable, trainers: list[ControllerTrainer], folder: Path, budgets_ms: Tensor
) -> None:
    """Train every seed that is not finished, from its last checkpoint where there is one."""
    for trainer in trainers:
        trainer.folder = folder / "checkpoints" / f"seed{trainer.seed}"
        resumed = trainer.resume(trainer.folder / "last.pt")
        if not trainer.finished:
            # the checkpoint was written before the rows of its own iteration were complete
            step = trainer.iteration - 1 if resumed else None
            with _tracker(config, table, folder, "train", trainer.seed, step) as trainer.log:
                trainer.run()
        with threadpool_limits(config.threads):
            _finish(config.policy, table, trainer, budgets_ms)


def _finish(policy: PolicyConfig, table: ProfileTable, trainer: ControllerTrainer, budgets_ms: Tensor) -> None:
    """What comes after training, unless it is done: experts and a guard around an ensemble that predicts outcomes, and
    under mean budgets the price of each."""
    assert trainer.folder is not None
    path = trainer.folder / "best.pt"
    network = load_checkpoint(path).controller
    stacked = policy.structure == "utility" and policy.members > 1
    if not isinstance(network, Controller) or not (stacked or trainer.priced):
        return
    fitted, limits, seed = torch.cat([trainer.split.train, trainer.split.validation]), trainer.limits, trainer.seed
    extra = trainer.provenance()
    if trainer.priced and stacked:
        done: StackedController | PricedChooser = price_stack(table, fitted, network, policy, limits, budgets_ms, seed)
    elif trainer.priced:
        trainer.agent.load_state_dict(network.state_dict())
        folds = list(zip(*trainer.divide(), strict=True))
        mask = table.mask[trainer.judged_rows]
        done = price_controller(
            table, network, lambda worth: trainer.choose({}, worth.reshape(1), mask), folds, policy, budgets_ms
        )
    else:
        done = fit_stack(table, fitted, network, policy, limits, seed)
    if isinstance(stack := getattr(done, "chooser", done), StackedController):
        extra["validation_utility"] = stack.held_out_worth
    save_checkpoint(path, done, table, extra)


def _judged_by_deadlines(
    config: TrainRun,
    table: ProfileTable,
    split: Split,
    budgets_ms: Tensor,
    trainer: ControllerTrainer,
    controllers: list[Any],
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The contents of `results.json` and of `decisions.parquet`."""
    fitted, test = torch.cat([split.train, split.validation]), split.test
    baselines: list[Any] = [BudgetAwareStatic(table, fitted), Oracle(table, test)]
    if config.baselines:
        baselines = list(make_baselines(table, split, seed=config.seeds[0], budgets_ms=budgets_ms))
        if len(rows_by_dataset(table, test)) > 1:
            baselines.insert(1, StaticPerDataset(table, fitted, test))
    rewards = trainer.env.rewards
    judged = judge_policies(table, test, budgets_ms, rewards, controllers, baselines)
    results = results_of(table, test, budgets_ms, rewards, controllers, config.seeds, baselines, judged)
    return results, decisions_of(table, test, judged, config.seeds)


def _judged_by_means(
    config: TrainRun,
    table: ProfileTable,
    split: Split,
    budgets_ms: Tensor,
    trainer: ControllerTrainer,
    controllers: list[Any],
) -> tuple[dict[str, Any], pl.DataFrame]:
    """The same under mean budgets."""
    fitted, test = torch.cat([split.train, split.validation]), split.test
    own = [controller for controller in controllers if isinstance(controller, PricedChooser)]
    baselines = make_priced_baselines(table, split, budgets_ms, config.seeds[0]) if config.baselines else []
    outcomes = outcomes_of(table, fitted, test, budgets_ms, own, baselines)
    results = mean_results_of(table, fitted, test, budgets_ms, own, config.seeds, baselines, outcomes)
    return results, mean_decisions_of(table, test, budgets_ms, outcomes, config.seeds)


def _tracker(
    config: TrainRun,
    table: ProfileTable,
    folder: Path,
    job_type: str,
    seed: int | None = None,
    resume_step: int | None = None,
) -> Tracker:
    return Tracker(
        folder,
        name=folder.name,
        experiment=config.experiment,
        job_type=job_type,
        config=asdict(config),
        settings=config.tracking,
        seed=seed,
        tags=[config.policy.structure, config.loss.objective, f"reward-{config.reward.kind}"],
        profile_digest=table.digest,
        profile=profile_of(table),
        resume_step=resume_step,
    )


def _trainers(config: TrainRun, table: ProfileTable, split: Split, budgets_ms: Tensor) -> list[ControllerTrainer]:
    if config.device not in ("cpu", "cuda") or (config.device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device={config.device}: must be cpu, or cuda where torch finds it")
    return [
        ControllerTrainer(
            table,
            split,
            policy=config.policy,
            loss=config.loss,
            optimiser=config.optimiser,
            budgets_ms=budgets_ms,
            budget=config.budget,
            reward=config.reward,
            balance=config.balance,
            augmentation=config.augmentation,
            seed=seed,
            device=config.device,
        )
        for seed in config.seeds
    ]


def _keep_best(folder: Path, seeds: list[int]) -> tuple[list[Loaded], list[float]]:
    """Load every seed's best controller; the best of them on validation becomes the run's `best.pt`."""
    paths = [folder / "checkpoints" / f"seed{seed}" / "best.pt" for seed in seeds]
    loaded = [load_checkpoint(path) for path in paths]
    scores = [float(one.extra["validation_utility"]) for one in loaded]
    winner = paths[scores.index(max(scores))]
    for name in ("best.pt", "last.pt"):
        with written_whole(folder / "checkpoints" / name) as temporary:
            shutil.copyfile(winner.with_name(name), temporary)
    return loaded, scores


if __name__ == "__main__":
    from knobwise.__main__ import main

    sys.exit(main(["train", "experiment=controller", *sys.argv[1:]]))
