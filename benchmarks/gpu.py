"""Training on a GPU beside the same machine's CPU: a table of 10⁷ cells, iterations, torch.compile.

Unlike in the other benchmarks all times are of the wall clock: a GPU works on after the call that
started it, so the clock is read when it has finished. With as many contexts as the default run the
CPU has one thread, as in that run; with more it has all cores.

    python benchmarks/gpu.py [device=cuda] [PART …]

The parts are `table`, `iterations` and `compile`; without any, all three. `device=cpu` shows that
the script works.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from knobwise.agents.calibration.training import distillation_trainer
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.trainer import Trainer
from knobwise.envs import builtin_profile
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.losses.settings import LossConfig

CONTEXTS = (256, 4096, 32768)
"""Contexts of an iteration for each network; the default run has the first number."""
POLICY = PolicyConfig(teacher=True, fold_networks=5, hidden=64, dropout=0.0, drift=0.3)
LONG = 10**6
STAGES = {
    "regression": {"teacher_iterations": LONG, "pretrain_iterations": 1},
    "imitation": {"teacher_iterations": 0, "pretrain_iterations": LONG},
    "GRPO": {"teacher_iterations": 0, "pretrain_iterations": 0, "iterations": LONG},
    "exact GRPO": {"teacher_iterations": 0, "pretrain_iterations": 0, "iterations": LONG},
}
SAMPLES = 10**5
KNOB_VALUES = 10
ITERATIONS = 100
"""Of the warm-up, and as many of GRPO."""
WARM_UP = 3
ROUNDS = 5
MIN_SECONDS = 0.1
"""A round lasts at least as long, by several calls."""


def set_threads(contexts: int) -> None:
    """Let the CPU use one thread for few contexts, and all cores for more."""
    torch.set_num_threads(1 if contexts == CONTEXTS[0] else os.cpu_count() or 1)


def wait_for(device: str) -> None:
    """Return when a device has finished its work."""
    if device != "cpu":
        torch.accelerator.synchronize(device)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, the median of some rounds."""
    for _ in range(WARM_UP):
        call()
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    count = max(1, round(MIN_SECONDS / (time.perf_counter() - start)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait_for(device)
        rounds.append((time.perf_counter() - start) / count)
    return statistics.median(rounds)


def tell(what: str, unit: str, values: list[float]) -> None:
    """Print a row: two numbers with their unit, and the second / the first."""
    numbers = [f"{value:.4g} {unit}" for value in values]
    print(f"| {what} | {' | '.join(numbers)} | {values[1] / values[0]:.3g} × |", flush=True)


# -- iterations of the default run -----------------------------------------------------------------


def trainer_of(stage: str, contexts: int, device: str) -> Trainer:
    """Return a trainer that has begun this stage; nothing is judged or logged."""
    lengths = {"iterations": 1, **STAGES[stage]}
    optimiser = OptimiserConfig(
        contexts=contexts, minibatch=contexts // 2, epochs=2, evaluate_every=LONG, **lengths
    )
    objective = "exact" if stage == "exact GRPO" else "sampled"
    loss = LossConfig(objective=objective, group_size=16)
    table = builtin_profile()
    trainer = distillation_trainer(
        table, table.split(), policy=POLICY, loss=loss, optimiser=optimiser, device=device
    )
    trainer.policy.stage = trainer.stage
    trainer.optimiser = trainer.stage.optimiser(trainer.stage.module)
    trainer.state.iteration = 1
    return trainer


def iteration_of(trainer: Trainer) -> Callable[[], object]:
    """Return what does an iteration: contexts are collected, and learned from."""
    stream = iter(trainer.collector)

    def iterate() -> None:
        trainer._train_step(trainer.stage, stream)
        trainer.state.iteration += 1

    return iterate


def time_iterations(device: str) -> None:
    """Time an iteration of each stage, with few and with many contexts."""
    for stage in STAGES:
        for contexts in CONTEXTS:
            set_threads(contexts)
            times = []
            for where in ("cpu", device):
                iterate = iteration_of(trainer_of(stage, contexts, where))
                times.append(1e3 * seconds_of(iterate, where))
            tell(f"{stage}, {contexts:,} contexts", "ms", times)


# -- a table of 10⁷ cells --------------------------------------------------------------------------


def large_table() -> ProfileTable:
    """Return a table of drawn outcomes, in which slower configurations are more accurate."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, 64, generator=generator)
    values = torch.arange(KNOB_VALUES)
    configurations = torch.cartesian_prod(values, values)
    speed = configurations.sum(1).float()
    noise = torch.randn(SAMPLES, len(configurations), generator=generator)
    knob = tuple(range(KNOB_VALUES))
    return ProfileTable(
        name="drawn",
        knobs=(Knob("a", knob), Knob("b", knob)),
        configurations=configurations,
        accuracy=(features[:, :1] + 0.1 * speed + noise > 0.5).float(),
        latency_ms=(2 + speed) * (1 + 0.05 * noise.abs()),
        mask=torch.ones(SAMPLES, len(configurations), dtype=torch.bool),
        sample_ids=tuple(map(str, range(SAMPLES))),
        features={"features": features},
    )


def train_on_large(contexts: int, device: str) -> tuple[float, float, float]:
    """Return the seconds of a training with its evaluations, and the most memory of the process
    and of the device in GB."""
    set_threads(contexts)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    table = large_table()
    split = table.split()
    optimiser = OptimiserConfig(
        pretrain_iterations=ITERATIONS,
        iterations=ITERATIONS,
        contexts=contexts,
        minibatch=contexts // 2,
        epochs=2,
        evaluate_every=ITERATIONS,
    )
    loss = LossConfig(objective="sampled", group_size=16)
    wait_for(device)
    start = time.perf_counter()
    trainer = distillation_trainer(
        table, split, policy=PolicyConfig(hidden=256), loss=loss, optimiser=optimiser, device=device
    )
    trainer.run()
    wait_for(device)
    seconds = time.perf_counter() - start
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    on_device = most if device == "cpu" else torch.cuda.max_memory_allocated(device) / 1e9
    return seconds, most, on_device


def time_table(device: str) -> None:
    """Train on the large table, each time in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for contexts in CONTEXTS[:2]:
            results = [pool.apply(train_on_large, (contexts, where)) for where in ("cpu", device)]
            about = f"on 10⁷ cells, {contexts:,} contexts"
            tell(f"{2 * ITERATIONS} iterations {about}", "s", [each[0] for each in results])
            tell(f"most memory of the process {about}", "GB", [each[1] for each in results])
            tell(f"most memory of the device {about}", "GB", [each[2] for each in results])


# -- torch.compile ---------------------------------------------------------------------------------


def learn_from(loss: Callable[[Any], Any], batch: TensorDict, module: nn.Module) -> None:
    """Compute a loss and its gradient."""
    for parameter in module.parameters():
        parameter.grad = None
    out = loss(batch)
    sum(value for value in out.values() if value.requires_grad).backward()


def ways(contexts: int, device: str) -> dict[str, Callable[[Any], Callable[[], object]]]:
    """Return what is compiled: the loss, with the policy inside, and the policy alone.

    Each is a function of how a module is wrapped, and returns the call to time.
    """
    trainer = trainer_of("GRPO", contexts, device)
    stage: Any = trainer.stage
    stage.grpo.diagnostics = False
    stage.grpo.reward_spread = 1.0
    next(iter(trainer.collector))
    batch = trainer.buffer[:]
    controller = trainer.setup.controller
    rows = trainer.setup.rows
    # as the policy gets them: [M, n, …]
    row = batch["row"].T
    features = rows.features_of(row)
    limits = batch["budget_ms"].T.contiguous()
    by_value = rows.by_value[row]

    def learning(wrap: Any) -> Callable[[], object]:
        loss = wrap(stage.grpo)
        return lambda: learn_from(loss, batch, controller)

    def deciding(wrap: Any) -> Callable[[], object]:
        network = wrap(controller.network)
        return torch.no_grad()(lambda: network(features, limits, by_value=by_value))

    return {"loss and policy, a gradient": learning, "policy, decisions": deciding}


def time_compiled(device: str) -> None:
    """Time loss and policy compiled, beside what they are without it."""
    graphs = functools.partial(torch.compile, mode="reduce-overhead")
    compilers = {"cpu": {"compiled": torch.compile}}
    if device != "cpu":
        compilers[device] = compilers["cpu"] | {"compiled, with CUDA graphs": graphs}
    for contexts in CONTEXTS[:2]:
        set_threads(contexts)
        for where, wraps in compilers.items():
            for what, call_of in ways(contexts, where).items():
                eager = 1e3 * seconds_of(call_of(lambda module: module), where)
                for how, wrap in wraps.items():
                    torch.compiler.reset()
                    times = [eager, 1e3 * seconds_of(call_of(wrap), where)]
                    tell(f"{what}, {contexts:,} contexts on {where}, {how}", "ms", times)


PARTS = {"table": time_table, "iterations": time_iterations, "compile": time_compiled}
"""In this order: the memory of a process counts what its parent had when it was started."""


def main(words: list[str]) -> None:
    """Run the parts that the words name."""
    device = "cuda"
    for word in words:
        if word.startswith("device="):
            device = word.removeprefix("device=")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    card = "no GPU"
    if device != "cpu":
        card = torch.cuda.get_device_name(device)
    print(f"{card}, {os.cpu_count()} cores, torch {torch.__version__}")
    chosen = set(PARTS) & set(words) or set(PARTS)
    for name, time_part in PARTS.items():
        if name in chosen:
            time_part(device)


if __name__ == "__main__":
    main(sys.argv[1:])
