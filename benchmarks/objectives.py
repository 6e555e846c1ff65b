"""Exact GRPO against sampled GRPO with G = 8, 16 and 64 draws: CPU time to the same held-out utility, one thread.

All start from the same controller after a short warm-up (so that there is something left to gain), train on the same
contexts of the built-in profile, and are judged on its validation split every 5 iterations. Each seed has a level that
all are timed to: nine tenths of the way from the warm start to the best utility that the worst of them reaches. Only
training counts, not judging. Prints the medians over the seeds, and the ratios to exact.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
from collections.abc import Mapping

import torch

from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs import RewardConfig, builtin_profile
from knobwise.losses.settings import LossConfig

SEEDS, WARM_UP, ITERATIONS, EVERY = 5, 100, 120, 5
OBJECTIVES = {
    "exact": LossConfig(objective="exact"),
    **{f"sampled, G = {g}": LossConfig(objective="sampled", group_size=g) for g in (8, 16, 64)},
}
REWARD, POLICY = RewardConfig(kind="utility"), PolicyConfig(structure="additive", members=1)


class Curve:
    """A logger that keeps validation utility over the CPU time of all iterations so far."""

    def __init__(self, trainer: ControllerTrainer) -> None:
        self.seconds, self.points = 0.0, []
        iterate = trainer.iterate

        def timed(stream: object) -> dict[str, float]:
            start = time.process_time()
            metrics = iterate(stream)
            self.seconds += time.process_time() - start
            return metrics

        trainer.iterate, trainer.log = timed, self
        self.points: list[tuple[float, float]]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "Val/Utility" in metrics:
            self.points.append((self.seconds, metrics["Val/Utility"]))

    def until(self, level: float) -> float:
        """CPU seconds until the level was first reached."""
        return next(seconds for seconds, utility in self.points if utility >= level)


def compare(seed: int) -> dict[str, tuple[float, float]]:
    """For each objective the CPU seconds to the common level, and the best utility."""
    table = builtin_profile()
    split = table.split()
    warm_up = OptimiserConfig(warmup_iterations=WARM_UP, iterations=0)
    start = (
        ControllerTrainer(table, split, policy=POLICY, optimiser=warm_up, reward=REWARD, seed=seed).run().state_dict()
    )
    curves = {}
    for name, loss in OBJECTIVES.items():
        settings = OptimiserConfig(warmup_iterations=0, iterations=ITERATIONS, evaluate_every=EVERY, patience=0)
        trainer = ControllerTrainer(
            table, split, policy=POLICY, loss=loss, optimiser=settings, reward=REWARD, seed=seed
        )
        trainer.agent.load_state_dict(start)
        trainer.reference.load_state_dict(start)
        curves[name] = Curve(trainer)
        trainer.run()
    best = {name: max(utility for _, utility in curve.points) for name, curve in curves.items()}
    first = curves["exact"].points[0][1]
    level = first + 0.9 * (min(best.values()) - first)
    print(f"seed {seed}: warm start {first:.4f}, level {level:.4f}", flush=True)
    return {name: (curve.until(level), best[name]) for name, curve in curves.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        results = [compare(seed) for seed in range(SEEDS)]
    exact = statistics.median(seed["exact"][0] for seed in results)
    for name in OBJECTIVES:
        seconds = statistics.median(seed[name][0] for seed in results)
        best = statistics.median(seed[name][1] for seed in results)
        print(
            f"{name}: {seconds:.2f} CPU s to the level, best utility {best:.4f}; ratio to exact {seconds / exact:.2f}"
        )
