"""The training loop with TorchRL against the same mathematics in plain torch, in CPU time on one thread.

Prints the CPU ms per iteration of each (the fastest of 12 rounds, in which they take turns) and their ratio: for both
stages of the default policy on the built-in profile; and for a plain head over the knobs with both objectives, on the
built-in profile and on a simulated one with 2,848 features and 240 configurations (0.8 M parameters). For the plain
head both loops draw contexts, let the policy decide, make two passes of GRPO in minibatches of 64, clip the gradient,
and compute what a run logs in every 20th iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from timing import Functions, in_turns, random_table
from torch import Tensor, nn
from torch.nn import functional

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.predictors.folds import rows_of_members
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs import RewardConfig, builtin_profile
from knobwise.envs.configurations.contexts import ContextSampler
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.losses.advantage import group_advantage
from knobwise.losses.functional import clipped_surrogate, effective_sample_size, entropy, expectation, k3
from knobwise.losses.regression import gaussian_nll
from knobwise.losses.settings import LossConfig

ROUNDS, ITERATIONS = 12, 20
KNOBS = tuple(Knob(name, tuple(range(1, size + 1))) for name, size in (("a", 4), ("b", 6), ("c", 10)))
REWARD = RewardConfig(kind="utility")
POLICY = PolicyConfig(structure="additive", members=1)
DEFAULT = GROUPS["optimiser"]["auto"]
SETTINGS = OptimiserConfig(warmup_iterations=0, iterations=10**6, contexts=256, minibatch=64, epochs=2)


def with_torchrl(table: ProfileTable, **settings: Any) -> Callable[[], None]:
    trainer = ControllerTrainer(table, table.split(), reward=REWARD, **settings)
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer.iterate(stream)
        trainer.iteration += 1

    return iterate


def adamw(network: nn.Module, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW that leaves biases alone."""
    named = list(network.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    weights = [parameter for name, parameter in named if not name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": biases}]
    return torch.optim.AdamW(groups, weight_decay=0.0, fused=True)


class Batch(NamedTuple):
    """What the policy decided in some contexts."""

    x: Tensor
    budgets: Tensor
    drawn: Tensor
    old: Tensor
    advantage: Tensor
    weight: Tensor
    """[P, 0] when sampled: every draw counts 1/G."""
    reference: Tensor


class PlainLoop:
    """GRPO of a plain head over the knobs, without TorchRL."""

    def __init__(self, table: ProfileTable, settings: LossConfig) -> None:
        torch.manual_seed(0)
        train = table.split().train
        self.table, self.settings, self.exact = table, settings, settings.objective == "exact"
        self.controller = Controller.for_table(table, train, POLICY).eval()
        self.reference = Controller.for_table(table, train, POLICY).eval()
        self.features = self.controller.features(table.features, table.num_samples)
        self.contexts = ContextSampler(table, BudgetConfig(), train, seed=0)
        self.rewards = RewardTable(table, REWARD)
        self.optimiser = adamw(self.controller, SETTINGS.weight_decay)
        self.iteration = 0

    def iterate(self) -> None:
        logged = self.iteration % SETTINGS.evaluate_every == 0
        self.iteration += 1
        rows, budgets = self.contexts(SETTINGS.contexts)
        decided = self._decide(rows, budgets, logged)
        numbers: list[Tensor] = []
        for _ in range(SETTINGS.epochs):
            order = torch.randperm(SETTINGS.contexts)
            for parts in zip(*(each[order].split(SETTINGS.minibatch) for each in decided), strict=True):
                numbers += self._step(Batch(*parts), logged)
        if logged:
            torch.stack(numbers).mean(0).tolist()
            drawn = decided.drawn
            latency = self.table.latency_ms[rows[:, None], drawn]
            accuracy = self.table.accuracy[rows[:, None], drawn]
            for values in (self.rewards.chosen(rows, drawn, budgets), accuracy, latency):
                float(values.mean()), float(values.std())
            float((latency > budgets[:, None]).float().mean())

    @torch.no_grad()
    def _decide(self, rows: Tensor, budgets: Tensor, logged: bool) -> Batch:
        x = self.features[rows]
        old = self._log_probs(self.controller, x, budgets)
        drawn = torch.multinomial(old.exp(), 1 if self.exact else self.settings.group_size, replacement=True)
        reference = self._log_probs(self.reference, x, budgets) if logged else old
        if self.exact:
            weight, reward = old.exp(), self.rewards.all(rows, budgets)
        else:
            old, reference = old.gather(1, drawn), reference.gather(1, drawn)
            weight, reward = torch.empty(SETTINGS.contexts, 0), self.rewards.chosen(rows, drawn, budgets)
        advantage = group_advantage(reward, self.settings.advantage, weight=weight if self.exact else None)
        return Batch(x, budgets, drawn, old, advantage, weight, reference)

    def _step(self, batch: Batch, logged: bool) -> list[Tensor]:
        """One step of the optimiser; the numbers of the log, in one tensor."""
        new = log_probs = self._log_probs(self.controller, batch.x, batch.budgets)
        weight: Tensor | None = batch.weight
        if not self.exact:
            new, weight = log_probs.gather(1, batch.drawn), None
        surrogate, cut = clipped_surrogate(new, batch.old, batch.advantage, self.settings.clip_epsilon)
        loss = -expectation(surrogate, weight).mean()
        self.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.controller.parameters(), SETTINGS.clip_grad)
        self.optimiser.step()
        if not logged:
            return []
        with torch.no_grad():
            log_ratio = new - batch.old
            numbers = [
                entropy(log_probs).mean(),
                expectation(k3(new, batch.reference), weight).mean(),
                -expectation(log_ratio, weight).mean(),
                expectation(cut.float(), weight).mean(),
                effective_sample_size(log_ratio, weight),
                expectation(log_ratio.exp(), weight).mean(),
                (batch.advantage.abs() < 1e-6).all(-1).float().mean(),
                loss.detach(),
                norm,
            ]
            return [torch.stack(numbers)]

    @staticmethod
    def _log_probs(controller: Controller, x: Tensor, budgets: Tensor) -> Tensor:
        log_probs: Tensor = controller.network(x.unsqueeze(0), budgets.unsqueeze(0))  # an ensemble of one
        return log_probs.squeeze(0)


def default_in_plain_torch(table: ProfileTable, warming_up: bool) -> Callable[[], None]:
    """The default policy, five utility networks side by side: regression, or exact GRPO together with regression."""
    torch.manual_seed(0)
    split, config, settings = table.split(), GROUPS["policy"]["auto"], LossConfig()
    members = rows_of_members(table, split, config.members, 0)[0]
    fitted = torch.cat([split.train, split.validation])
    controller = Controller.for_table(table, fitted, config)
    network = controller.network
    features = controller.features(table.features, table.num_samples)
    contexts, rewards = ContextSampler(table, BudgetConfig(), members, seed=0), RewardTable(table, REWARD)
    log_latency = table.latency_ms.log()
    optimiser = adamw(controller, DEFAULT.weight_decay)

    def iterate() -> None:
        rows, budgets = contexts(DEFAULT.contexts * config.members)
        rows, budgets = (each.reshape(DEFAULT.contexts, config.members).T for each in (rows, budgets))
        x = features[rows]
        controller.eval()
        with torch.no_grad():
            old = network(x, budgets)
            drawn = torch.multinomial(old.exp().flatten(0, 1), 1)
            rewards.chosen(rows.flatten(), drawn, budgets.flatten())
            if not warming_up:
                reward = rewards.all(rows.flatten(), budgets.flatten()).reshape(old.shape)
                weight = old.exp()
                advantage = group_advantage(reward, settings.advantage, weight=weight)
        controller.train(warming_up)
        for batch in torch.randperm(DEFAULT.contexts).split(DEFAULT.minibatch):
            outcomes = network.outcomes(x[:, batch])
            which = rows[:, batch]
            wrong = functional.binary_cross_entropy_with_logits(outcomes.accuracy_logits, table.accuracy[which])
            loss = wrong + gaussian_nll(log_latency[which], outcomes.log_latency, outcomes.spread).mean()
            if not warming_up:
                new = (network.sharpness * network.scores(outcomes, budgets[:, batch])).log_softmax(-1)
                surrogate, _ = clipped_surrogate(new, old[:, batch], advantage[:, batch], settings.clip_epsilon)
                loss = settings.regression_coeff * loss - expectation(surrogate, weight[:, batch]).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(controller.parameters(), DEFAULT.clip_grad)
            optimiser.step()

    return iterate


def compare(name: str, functions: Functions, iterations: int = ITERATIONS) -> None:
    # the fastest round of each, as timeit takes it: whatever else goes on in the machine only adds
    first, second = (min(values) for values in in_turns(functions, ROUNDS, iterations).values())
    print(f"{name}: TorchRL {first:.2f} ms, plain torch {second:.2f} ms; ratio {first / second:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    builtin = builtin_profile()
    for stage in ("regression", "GRPO"):
        warming_up = stage == "regression"
        settings = replace(DEFAULT, warmup_iterations=10**6 if warming_up else 0, iterations=10**6)
        ways = {
            "TorchRL": with_torchrl(builtin, policy=GROUPS["policy"]["auto"], optimiser=settings),
            "plain torch": default_in_plain_torch(builtin, warming_up),
        }
        compare(f"built-in, default policy, {stage}", ways, 4)
    for table in (builtin, random_table("simulated", KNOBS, 2_000, {"features": 2_848})):
        for objective in ("exact", "sampled"):
            loss = LossConfig(objective=objective, group_size=8)
            ways = {
                "TorchRL": with_torchrl(table, policy=POLICY, loss=loss, optimiser=SETTINGS),
                "plain torch": PlainLoop(table, loss).iterate,
            }
            compare(f"{table.name}, {objective}", ways)
