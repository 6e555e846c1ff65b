"""The training of a controller as a run does it, with a teacher or without one (`policy.teacher`).

With a teacher (`policy=auto`) there are three steps: the teacher learns what was measured; the
heads imitate what it makes of requests; and GRPO, or PPO, learns from rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from knobwise.agents.calibration.deployed_controller import DeployedController
from knobwise.agents.problem import Problem
from knobwise.agents.teacher.distiller import Distiller
from knobwise.agents.teacher.experts import Experts
from knobwise.agents.teacher.stages import Distillation, regression_stages
from knobwise.agents.training.controller_settings import ControllerSettings
from knobwise.agents.training.controller_stages import grpo_stage
from knobwise.agents.training.controllers import ControllerSetup, controller_trainer, make_trainer
from knobwise.agents.training.seeding import seeded
from knobwise.agents.training.trainer import Trainer
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.envs.tables.splits import cluster_numbers

if TYPE_CHECKING:
    from knobwise.agents.training.stage import Log


def distillation_trainer(
    table: ProfileTable | Problem,
    split: Split | None = None,
    *,
    experts: Callable[[], Experts] | None = None,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    log: Log | None = None,
    **settings: Any,
) -> Trainer:
    """Return the training of a controller, with a teacher if `policy.teacher` says so and there is
    a warm-up.

    Args:
        experts: returns the teacher's experts, fitted on the training and validation samples; None
            fits them here.
        table: the profile; or the problem, where some cells are predicted or further costs limited.
        split: of a profile, see `ControllerSetup`; a problem has its own.
        settings: see `ControllerSettings`.
        seed, device, folder, log: see `Trainer`.
    """
    policy = settings.get("policy")
    optimiser = settings.get("optimiser")
    warm = optimiser is None or optimiser.pretrain_iterations > 0
    if policy is None or not policy.teacher or not warm:
        return controller_trainer(
            table, split, seed=seed, device=device, folder=folder, log=log, **settings
        )
    with seeded(seed, device):
        distiller = Distiller(experts)
        setup = ControllerSetup(
            Problem.from_table(table, split, settings.get("budget")),
            ControllerSettings(**settings),
            seed=seed,
            device=device,
            distiller=distiller,
        )
        agent = DeployedController(setup.controller, distiller.teacher).eval()
        stages = [
            *regression_stages(setup, distiller.teacher),
            Distillation(setup, lambda: distiller.targets),
            grpo_stage(setup),
        ]
        return make_trainer(setup, agent, stages, folder, log)


def best_is_of_grpo(trainer: Trainer) -> bool:
    """Return True if the weights that are kept are GRPO's, and not from before it."""
    return trainer.state.best.iteration > trainer.stages[-1].first


def gained_by_sample(trainer: Trainer) -> dict[str, Tensor]:
    """Return the scores of each held-out sample where GRPO starts and of the kept weights.

    If the kept weights are from before GRPO, it added nothing, and both are their scores.

    Returns:
        Mean scores over the limits, [n], under `start` and `best`, and the number of the cluster of
        each sample, int64 [n], under `clusters`; {} without warm-up or GRPO.
    """
    before = trainer.stages[-1].scores_before
    best = trainer.state.best.by_sample
    if before is None or best is None:
        return {}
    setup = trainer.setup
    clusters = cluster_numbers(setup.problem.facts, setup.held_out.rows)
    start = before if best_is_of_grpo(trainer) else best
    return {"start": start, "best": best, "clusters": clusters}
