"""An iteration of each stage of training, beside the same mathematics in plain torch.

The stages are those of the default run on the built-in profile: the teacher's regression, the
heads' imitation, and GRPO. Both ways have the same networks, draw as many contexts, take as many
steps of AdamW, and clip the gradient. The plain way has no environment, no TensorDict, no replay
buffer and no settings. Nothing is logged. Their losses on a batch are the same.

    python benchmarks/loop.py
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from loss import grpo_loss
from timing import Bench
from torch import Tensor, nn
from torch.nn import functional

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs import builtin_profile
from knobwise.losses.settings import LossConfig

TABLE = builtin_profile()
POLICY = PolicyConfig(teacher=True, members=5, hidden=64, dropout=0.0, drift=0.3)
LOSS = LossConfig(objective="sampled", group_size=16)
CONTEXTS = 256
MINIBATCH = 128
EPOCHS = 2
LONG = 10**6
STAGES = {
    "regression": {"teacher_iterations": LONG, "warmup_iterations": 1},
    "imitation": {"teacher_iterations": 0, "warmup_iterations": LONG},
    "GRPO": {"teacher_iterations": 0, "warmup_iterations": 0, "iterations": LONG},
}
Losses = Callable[[], Iterator[Tensor]]
"""Draws contexts, and returns the loss of each minibatch."""


def trainer_of(stage: str) -> ControllerTrainer:
    """Return a trainer that begins with this stage; nothing is judged or logged."""
    lengths: dict[str, Any] = {"iterations": 1, **STAGES[stage]}
    optimiser = OptimiserConfig(
        contexts=CONTEXTS, minibatch=MINIBATCH, epochs=EPOCHS, evaluate_every=LONG, **lengths
    )
    trainer = ControllerTrainer(TABLE, TABLE.split(), policy=POLICY, loss=LOSS, optimiser=optimiser)
    trainer.iteration = 1
    return trainer


def grpo(trainer: ControllerTrainer, network: nn.Module, reference: nn.Module) -> Losses:
    """Return plain GRPO over drawn actions."""
    env = trainer.env
    table = env.table
    measured_ms = table.measurements_ms
    networks = trainer.networks
    x = trainer.all_features
    by_value = trainer.actor.module[0].module.by_value

    def losses() -> Iterator[Tensor]:
        with torch.no_grad():
            rows, limits = env.contexts(CONTEXTS * networks)
            rows = rows.view(CONTEXTS, networks).T
            limits = limits.view(CONTEXTS, networks).T
            inputs = x[rows % len(x)], limits, None, by_value[rows]
            old = network(*inputs)
            drawn = torch.multinomial(old.exp().flatten(0, 1), 16, replacement=True)
            drawn = drawn.view(networks, CONTEXTS, 16)
            cells = rows.unsqueeze(-1) * table.num_configurations + drawn
            measurement = torch.randint(measured_ms.shape[-1], cells.shape)
            latency = measured_ms.take(cells * measured_ms.shape[-1] + measurement)
            on_time = latency <= limits.unsqueeze(-1)
            reward = torch.where(on_time, table.accuracy.take(cells), -0.2)
            known = reference(*inputs).gather(-1, drawn)
            old = old.gather(-1, drawn)
        for _ in range(EPOCHS):
            for batch in torch.randperm(CONTEXTS).split(MINIBATCH):
                features, limit, _, drift = inputs
                log_probs = network(features[:, batch], limit[:, batch], None, drift[:, batch])
                yield grpo_loss(
                    log_probs.gather(-1, drawn[:, batch]),
                    old[:, batch],
                    known[:, batch],
                    reward[:, batch],
                )

    return losses


def imitation(trainer: ControllerTrainer, network: nn.Module) -> Losses:
    """Return the plain cross-entropy to the teacher's policy."""
    names = "x", "limit", "worth", "by_value"

    def losses() -> Iterator[Tensor]:
        for _ in range(EPOCHS * CONTEXTS // MINIBATCH):
            drawn = trainer.stage.draw(MINIBATCH)
            yield imitation_loss(network, *(drawn[name] for name in names))

    return losses


def imitation_loss(network: nn.Module, x: Tensor, limit: Tensor, worth: Tensor, drift: Any) -> Any:
    """Return the cross-entropy to the policy that the teacher's expected worths make."""
    target = (POLICY.sharpness * worth).softmax(-1)
    return -(target * network(x, limit, None, drift)).sum(-1).mean()


def regression(trainer: ControllerTrainer, network: nn.Module) -> Losses:
    """Return the plain regression on measured accuracies and latencies."""
    accuracy = TABLE.accuracy
    log_latency = trainer.log_latency
    variance = trainer.variance
    members = POLICY.members

    def losses() -> Iterator[Tensor]:
        for _ in range(EPOCHS * CONTEXTS // MINIBATCH):
            rows = trainer.env.contexts.draw_rows(MINIBATCH * trainer.networks)
            row = rows.view(MINIBATCH, -1)[:, :members].T % len(accuracy)
            outcomes = network(trainer.all_features[row])
            yield regression_loss(outcomes, accuracy[row], log_latency[row], variance[row])

    return losses


def regression_loss(outcomes: Any, accuracy: Tensor, log_ms: Tensor, variance: Tensor) -> Tensor:
    """Return the loss of predicted outcomes, [*, C] each."""
    logits, mean, spread = outcomes
    square = (log_ms - mean).square() + variance
    likelihood = 0.5 * square / spread.square() + spread.log()
    return functional.binary_cross_entropy_with_logits(logits, accuracy) + likelihood.mean()


def learn(losses: Losses, learned: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Take a step for each minibatch."""
    learned.train()
    for loss in losses():
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
        optimiser.step()


def check(trainer: ControllerTrainer, stage: str) -> None:
    """Fail unless the plain loss of a minibatch is the trainer's."""
    network = trainer.agent.controller.network
    if stage == "imitation":
        data = trainer.stage.draw(MINIBATCH)
        inputs = [data[key] for key in ("x", "limit", "worth", "by_value")]
        expected = imitation_loss(network, *inputs)
    elif stage == "GRPO":
        data = trainer.buffer[:]
        row = data["row"].T
        drift = trainer.actor.module[0].module.by_value[row]
        x = trainer.all_features[row % TABLE.num_samples]
        log_probs = network(x, data["budget_ms"].T, None, drift)
        drawn = data["configuration"].transpose(0, 1)
        keys = "action_log_prob", "reference_log_prob", ("next", "reward")
        parts = [data[key].transpose(0, 1) for key in keys]
        expected = grpo_loss(log_probs.gather(-1, drawn), *parts)
    else:
        data = trainer.stage.draw(MINIBATCH)
        row = data["row"][:, : POLICY.members].T % TABLE.num_samples
        outcomes = trainer.agent.teacher.network(trainer.all_features[row])
        measured = TABLE.accuracy[row], trainer.log_latency[row], trainer.variance[row]
        expected = regression_loss(outcomes, *measured)
    out = trainer.stage.loss(data)
    total: Any = sum(value for value in out.values() if value.requires_grad)
    torch.testing.assert_close(total, expected)


def time_stage(bench: Bench, stage: str) -> None:
    """Time iterations of a stage."""
    trainer = trainer_of(stage)
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer.iterate(stream)
        trainer.iteration += 1

    iterate()
    peers = {}
    if not bench.ours:
        check(trainer, stage)
        agent = copy.deepcopy(trainer.agent)
        learned = agent.controller.network
        if stage == "GRPO":
            losses = grpo(trainer, learned, copy.deepcopy(learned))
        elif stage == "imitation":
            losses = imitation(trainer, learned)
        else:
            learned = agent.teacher.network
            losses = regression(trainer, learned)
        optimiser = torch.optim.AdamW(learned.parameters(), lr=1e-4, fused=True)
        peers["plain torch"] = functools.partial(learn, losses, learned, optimiser)
    at_most = 1.10 if stage == "regression" else 1.05
    target = f"≤ {at_most:.2f} × plain torch"
    bench.line(f"training, {stage}, an iteration", "ms", iterate, peers, target=target)


if __name__ == "__main__":
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    BENCH = Bench()
    for name in STAGES:
        time_stage(BENCH, name)
