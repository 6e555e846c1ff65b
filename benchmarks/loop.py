"""An iteration of each stage of training, beside the same mathematics in plain torch.

The stages are those of the default run on the built-in profile: the teacher's regression, the
heads' imitation, and GRPO, also with a single network. Both ways have the same networks, draw as
many contexts, take as many steps of the same AdamW, and clip the gradient. The plain way has no
environment, no TensorDict, no replay buffer and no settings. Nothing is logged. The plain way
computes the same formulae of `knobwise.losses.functional`; that of GRPO is checked in `loss.py`.

    python benchmarks/loop.py
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from loss import BETA, grpo_loss
from timing import Bench, Way
from torch import Tensor, nn

from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.trainer import Trainer
from knobwise.envs import builtin_profile
from knobwise.losses.functional import reward_weighted_cross_entropy
from knobwise.losses.regression import regression_losses
from knobwise.losses.settings import LossConfig

TABLE = builtin_profile()
POLICY = PolicyConfig(
    teacher=True, fold_networks=5, hidden=64, dropout=0.0, drift=0.3, utility_head=True
)
# as after a warm-up
LOSS = LossConfig(
    objective="sampled", group_size=16, dropout=False, entropy_coeff=0.0, kl_to_ref_coeff=BETA
)
CONTEXTS = 256
MINIBATCH = 128
EPOCHS = 2
LONG = 10**6
STAGES = {
    "regression": {"teacher_iterations": LONG, "pretrain_iterations": 1},
    "imitation": {"teacher_iterations": 0, "pretrain_iterations": LONG},
    "GRPO": {"teacher_iterations": 0, "pretrain_iterations": 0, "iterations": LONG},
}
SINGLE = "GRPO with one network"
Losses = Callable[[], Iterator[Tensor]]
"""Draws contexts, and returns the loss of each minibatch."""


def trainer_of(stage: str) -> Trainer:
    """Return a trainer that has begun this stage; nothing is judged or logged."""
    policy = POLICY
    if stage == SINGLE:
        stage = "GRPO"
        policy = replace(POLICY, teacher=False, fold_networks=1)
    lengths: dict[str, Any] = {"iterations": 1, **STAGES[stage]}
    optimiser = OptimiserConfig(
        contexts=CONTEXTS, minibatch=MINIBATCH, epochs=EPOCHS, evaluate_every=LONG, **lengths
    )
    trainer = distillation_trainer(
        TABLE, TABLE.split(), policy=policy, loss=LOSS, optimiser=optimiser
    )
    trainer.policy.stage = trainer.stage
    trainer.optimiser = trainer.stage.optimiser(trainer.stage.module)
    trainer.state.iteration = 1
    return trainer


def grpo(trainer: Trainer, network: nn.Module, reference: nn.Module) -> Losses:
    """Return plain GRPO over drawn actions."""
    env = trainer.env
    table = env.table
    measured_ms = table.measurements_ms
    networks = trainer.setup.networks
    x = trainer.setup.rows.all_features
    by_value = trainer.setup.rows.by_value

    def losses() -> Iterator[Tensor]:
        with torch.no_grad():
            rows, limits = env.contexts(CONTEXTS * networks)
            rows = rows.view(CONTEXTS, networks).T
            limits = limits.view(CONTEXTS, networks).T
            features = x[rows % len(x)]
            drift = by_value[rows]
            old = network(features, limits, by_value=drift)
            drawn = torch.multinomial(old.exp().flatten(0, 1), 16, replacement=True)
            drawn = drawn.view(networks, CONTEXTS, 16)
            cells = rows.unsqueeze(-1) * table.num_configurations + drawn
            measurement = torch.randint(measured_ms.shape[-1], cells.shape)
            latency = measured_ms.take(cells * measured_ms.shape[-1] + measurement)
            on_time = latency <= limits.unsqueeze(-1)
            reward = torch.where(on_time, table.accuracy.take(cells), -0.2)
            known = reference(features, limits, by_value=drift).gather(-1, drawn)
            old = old.gather(-1, drawn)
        for _ in range(EPOCHS):
            for batch in torch.randperm(CONTEXTS).split(MINIBATCH):
                log_probs = network(features[:, batch], limits[:, batch], by_value=drift[:, batch])
                yield grpo_loss(
                    log_probs.gather(-1, drawn[:, batch]),
                    old[:, batch],
                    known[:, batch],
                    reward[:, batch],
                )

    return losses


def imitation(trainer: Trainer, network: nn.Module) -> Losses:
    """Return the plain cross-entropy to the policy that the teacher's expected utility makes."""
    names = "x", "limit", "utility", "by_value"

    def losses() -> Iterator[Tensor]:
        for _ in range(EPOCHS):
            for drawn in trainer.stage.minibatches(trainer.buffer):
                x, limit, utility, drift = (drawn[name] for name in names)
                log_probs = network(x, limit, by_value=drift)
                yield reward_weighted_cross_entropy(log_probs, utility, 1 / POLICY.sharpness).mean()

    return losses


def regression(trainer: Trainer, network: nn.Module) -> Losses:
    """Return the plain regression on measured accuracies and latencies."""
    accuracy = TABLE.accuracy
    setup = trainer.setup
    stage: Any = trainer.stage

    def losses() -> Iterator[Tensor]:
        for _ in range(EPOCHS * CONTEXTS // MINIBATCH):
            rows = trainer.env.contexts.draw_rows(MINIBATCH * setup.networks)
            row = rows.view(MINIBATCH, -1)[:, : POLICY.fold_networks].T % len(accuracy)
            predicted = network(setup.rows.all_features[row])
            wrong, off = regression_losses(
                predicted,
                accuracy=accuracy[row],
                log_latency=stage.log_latency[row],
                variance=stage.variance[row],
            )
            yield wrong.mean() + off.mean()

    return losses


def learn(losses: Losses, learned: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Take a step for each minibatch."""
    learned.train()
    for loss in losses():
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimiser.step()


def time_stage(bench: Bench, stage: str) -> None:
    """Time iterations of a stage."""
    trainer = trainer_of(stage)
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer._train_step(trainer.stage, stream)
        trainer.state.iteration += 1

    def plain() -> dict[str, Way]:
        learned = copy.deepcopy(trainer.setup.controller).network
        if stage in ("GRPO", SINGLE):
            losses = grpo(trainer, learned, copy.deepcopy(learned))
        elif stage == "imitation":
            losses = imitation(trainer, learned)
        else:
            learned = copy.deepcopy(trainer.setup.distiller.teacher).network
            losses = regression(trainer, learned)
        # the same, which spares biases the decay, at a rate of no schedule
        optimiser = trainer.stage.optimiser(learned)
        for group in optimiser.param_groups:
            group["lr"] = 1e-4
        return {"plain torch": functools.partial(learn, losses, learned, optimiser)}

    iterate()
    what = f"training, {stage}, an iteration"
    at_most = {"regression": 1.10, SINGLE: 1.15}.get(stage, 1.05)
    bench.line(what, "ms", iterate, plain, target=f"≤ {at_most:.2f} × plain torch")


if __name__ == "__main__":
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    BENCH = Bench()
    for name in (*STAGES, SINGLE):
        time_stage(BENCH, name)
