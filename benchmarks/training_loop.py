"""The training loop with TorchRL against the same mathematics in plain torch, in CPU time on one thread.

Prints the CPU ms per iteration of each (the fastest of 12 rounds, in which they take turns) and their ratio, for both
stages of the default policy on the built-in profile.
"""

from __future__ import annotations

import copy
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from knobwise.agents.controller.controller import Controller
from knobwise.agents.predictors.folds import rows_of_members
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.contexts import ContextSampler
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import BudgetConfig
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.command_line.compose import GROUPS
from knobwise.losses.functional import clipped_surrogate, expectation, expected_k3, gaussian_nll, group_advantage
from knobwise.losses.settings import LossConfig

ROUNDS, ITERATIONS, KL_COEFF = 12, 4, 0.02
POLICY, REWARD, SETTINGS = GROUPS["policy"]["auto"], GROUPS["reward"]["utility"], GROUPS["optimiser"]["auto"]


def with_torchrl(table: ProfileTable, warming_up: bool) -> Callable[[], None]:
    settings = replace(SETTINGS, warmup_iterations=10**6 if warming_up else 0, iterations=10**6)
    trainer = ControllerTrainer(table, table.split(), policy=POLICY, reward=REWARD, optimiser=settings)
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer.iterate(stream)
        trainer.iteration += 1

    return iterate


def in_plain_torch(table: ProfileTable, warming_up: bool) -> Callable[[], None]:
    """Five utility networks side by side: regression, or exact GRPO together with regression. The warm-up draws no
    actions, and a TorchRL trainer draws some without asking the network."""
    torch.manual_seed(0)
    split, settings = table.split(), LossConfig()
    members = rows_of_members(table, split, POLICY.members, 0)[0]
    controller = Controller.for_table(table, torch.cat([split.train, split.validation]), POLICY)
    network = controller.network
    features = controller.features(table.features, table.num_samples)
    contexts, rewards = ContextSampler(table, BudgetConfig(), members, seed=0), RewardTable(table, REWARD)
    reference, sharpness = copy.deepcopy(network).requires_grad_(False), network.sharpness
    measured = table.measurements_ms.log()
    log_latency, variance = measured.mean(-1), measured.var(-1, correction=0)
    named = list(controller.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    weights = [parameter for name, parameter in named if not name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": SETTINGS.weight_decay}, {"params": biases}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)

    def iterate() -> None:
        rows, budgets = contexts(SETTINGS.contexts * POLICY.members)
        rows, budgets = (each.reshape(SETTINGS.contexts, POLICY.members).T for each in (rows, budgets))
        x = features[rows]
        controller.eval()
        if not warming_up:
            with torch.no_grad():
                old, kept = network(x, budgets), reference(x, budgets)
                reward = rewards.all(rows.flatten(), budgets.flatten()).reshape(old.shape)
                weight = old.exp()
                advantage = group_advantage(reward, settings.advantage, weight=weight)
        controller.train(warming_up)
        for batch in torch.randperm(SETTINGS.contexts).split(SETTINGS.minibatch):
            outcomes = network.outcomes(x[:, batch])
            which = rows[:, batch]
            wrong = functional.binary_cross_entropy_with_logits(outcomes.accuracy_logits, table.accuracy[which])
            off = gaussian_nll(log_latency[which], outcomes.log_latency, outcomes.spread, variance[which])
            loss = (wrong + off).mean()
            if not warming_up:
                new = (sharpness * network.scores(outcomes, budgets[:, batch])).log_softmax(-1)
                kl = expected_k3(new, kept[:, batch], old[:, batch], weight[:, batch]).mean()
                surrogate, _ = clipped_surrogate(new, old[:, batch], advantage[:, batch], settings.clip_epsilon)
                gain = expectation(surrogate, weight[:, batch]).mean()
                loss = settings.regression_coeff * loss - gain + KL_COEFF * kl
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(controller.parameters(), SETTINGS.clip_grad)
            optimiser.step()

    return iterate


def fastest_ms(ways: list[Callable[[], None]]) -> list[float]:
    """CPU ms per iteration of each way, in its fastest round, as timeit takes it: whatever else the machine does only
    adds. The ways take turns."""
    rounds: list[list[float]] = [[] for _ in ways]
    for _ in range(1 + ROUNDS):
        for way, times in zip(ways, rounds, strict=True):
            gc.collect()
            start = time.process_time()
            for _ in range(ITERATIONS):
                way()
            times.append((time.process_time() - start) / ITERATIONS * 1e3)
    return [min(times[1:]) for times in rounds]  # the first round warms up


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    builtin = builtin_profile()
    for stage in ("regression", "GRPO"):
        warming_up = stage == "regression"
        torchrl, plain = fastest_ms([with_torchrl(builtin, warming_up), in_plain_torch(builtin, warming_up)])
        print(f"built-in, default policy, {stage}: TorchRL {torchrl:.2f} ms, plain torch {plain:.2f} ms; ", end="")
        print(f"ratio {torchrl / plain:.3f}", flush=True)
