"""The training loop with TorchRL against the same mathematics in plain torch, interleaved, in CPU time.

Prints ms per iteration of each and their ratio. Both draw contexts, let the policy decide, and take one pass of sampled
GRPO over them; only the machinery differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from knobwise.agents.policy import Controller
from knobwise.agents.settings import LossConfig, OptimiserConfig, PolicyConfig
from knobwise.agents.trainer import Trainer
from knobwise.envs import RewardConfig, builtin_profile
from knobwise.envs.budgets import BudgetConfig
from knobwise.envs.contexts import ContextSampler
from knobwise.envs.reward import RewardTable
from knobwise.losses.advantage import group_advantage
from knobwise.losses.functional import clipped_surrogate

ROUNDS, ITERATIONS = 15, 20
SETTINGS = OptimiserConfig(
    warmup_iterations=0, iterations=10**6, contexts=256, minibatch=64, epochs=2, evaluate_every=10**6
)
LOSS = LossConfig(objective="sampled", group_size=8)


def with_torchrl() -> Callable[[], None]:
    trainer = Trainer(TABLE, SPLIT, loss=LOSS, optimiser=SETTINGS, reward=REWARD)
    stream = iter(trainer.collector)
    trainer.iteration = 1

    def iterate() -> None:
        trainer._learn(next(stream).squeeze(-1))

    return iterate


def in_plain_torch() -> Callable[[], None]:
    torch.manual_seed(0)
    controller = Controller.for_table(TABLE, SPLIT.train, PolicyConfig()).eval()
    features = controller.features(TABLE.features, TABLE.num_samples)
    contexts = ContextSampler(TABLE, BudgetConfig(), SPLIT.train, seed=0)
    rewards = RewardTable(TABLE, REWARD)
    optimiser = torch.optim.AdamW(
        controller.parameters(), lr=SETTINGS.lr, weight_decay=SETTINGS.weight_decay, fused=True
    )

    def iterate() -> None:
        rows, budgets = contexts(SETTINGS.contexts)
        with torch.no_grad():
            log_probs = controller(features[rows], budgets)
            drawn = torch.multinomial(log_probs.exp(), LOSS.group_size, replacement=True)
            old, reward = log_probs.gather(1, drawn), rewards.of(rows, drawn, budgets)
        for _ in range(SETTINGS.epochs):
            for batch in torch.randperm(SETTINGS.contexts).split(SETTINGS.minibatch):
                new = controller(features[rows[batch]], budgets[batch]).gather(1, drawn[batch])
                advantage = group_advantage(reward[batch], LOSS.advantage)
                loss = -clipped_surrogate(new, old[batch], advantage, LOSS.clip_epsilon)[0].mean()
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(controller.parameters(), SETTINGS.clip_grad)
                optimiser.step()

    return iterate


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    TABLE, REWARD = builtin_profile(), RewardConfig(kind="utility")
    SPLIT = TABLE.split()
    loops = {"TorchRL": with_torchrl(), "plain torch": in_plain_torch()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, iterate in loops.items():
            start = time.process_time()
            for _ in range(ITERATIONS):
                iterate()
            times[name].append((time.process_time() - start) / ITERATIONS * 1e3)
    median = {name: float(torch.tensor(values[1:]).median()) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name}: {value:.2f} ms of CPU per iteration ({SETTINGS.contexts} contexts × {LOSS.group_size} draws)")
    print(f"ratio TorchRL / plain torch: {median['TorchRL'] / median['plain torch']:.3f}")
