"""Which policy decides best: every policy and baseline on the built-in profile and on simulated tables.

`python experiments/studies/decisions.py` measures what is not measured yet and writes docs/decisions.md. Nested: a
policy chooses everything (weights, settings, when to stop, where to fall back) on samples outside the test part. A
simulated table is drawn anew for each seed and judged on 2,000 samples more than it is fitted on; the built-in profile
is split anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from threadpoolctl import threadpool_limits
from torch import Tensor

from knobwise.agents.judging.baselines import make_baselines
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.predictors.experts import Expert
from knobwise.agents.stack.stacked_controller import StackedController, fit_stack
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import LossConfig
from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.processes import in_processes
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardConfig, RewardTable
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.simulated.kinds import KINDS, SimulatedConfig, simulate
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.experiments.command_line.settings import GROUPS
from knobwise.experiments.studies.decisions_page import page_of

TEST_SAMPLES = 2000
OBJECTIVES = {
    "exact, centred": LossConfig(),
    "exact, z-score": LossConfig(advantage="zscore"),
    "exact, rank": LossConfig(advantage="rank"),
    "exact, unnormalised": LossConfig(advantage="unnormalised"),
    "sampled, G = 5": LossConfig(objective="sampled", group_size=5),
    "sampled, G = 16": LossConfig(objective="sampled", group_size=16),
    "sampled, G = 64": LossConfig(objective="sampled", group_size=64),
}
"""What is compared from one and the same warm start,"""
OBJECTIVE_TABLES = ("builtin", "router", "portfolio")
"""on these tables."""


@dataclass
class DecisionsConfig:
    """The settings, each as key=value."""

    tables: list[str] = field(default_factory=lambda: ["builtin", *(kind for kind in KINDS if kind != "wide_knobs")])
    """The built-in profile and kinds of simulated tables."""
    seeds: int = 5
    """How many seeds, of tables, splits and training."""
    runs: str = "runs/decisions"
    """Where each measurement is kept; what is there is not measured again."""
    out: str = "docs/decisions.md"
    """The page."""
    jobs: int = 2
    """Processes at once, one thread each."""


def run(config: DecisionsConfig) -> Path:
    """Measure every table with every seed, and write the page; gives its path.

    Raises:
        InputError: an unknown table.
    """
    unknown = [name for name in config.tables if name != "builtin" and name not in KINDS]
    if unknown:
        raise InputError(f"tables={unknown}: must be among builtin, {', '.join(KINDS)}")
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    # the built-in profile takes longest, so it goes first
    wanted = [(name, seed) for name in config.tables for seed in range(config.seeds)]
    missing = [cell for cell in wanted if not _file(folder, *cell).exists()]
    in_processes(
        "tables × seeds", measure, [(folder, *cell) for cell in missing], config.jobs, len(wanted) - len(missing)
    )
    found = [json.loads(_file(folder, *cell).read_text()) for cell in wanted]
    with written_whole(config.out) as temporary:
        temporary.write_text(page_of(found))
    return Path(config.out)


def folder_of(config: DecisionsConfig) -> Path:
    """Where measurements are kept: with another built-in profile, or other default settings, they are others."""
    fitted = [builtin_profile().digest, KINDS, GROUPS["policy"], GROUPS["optimiser"], GROUPS["reward"], OBJECTIVES]
    return Path(config.runs) / hashlib.sha256(repr(fitted).encode()).hexdigest()[:12]


def _file(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}.json"


def measure(folder: Path, name: str, seed: int) -> str:
    """Fit and judge everything on one table with one seed, and keep the numbers."""
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with threadpool_limits(1):
        found = {"table": name, "seed": seed, **_measured(*table_of(name, seed), seed, name in OBJECTIVE_TABLES)}
    with written_whole(_file(folder, name, seed)) as temporary:
        temporary.write_text(json.dumps(found, indent=1))
    return f"{name}, seed {seed}"


def table_of(name: str, seed: int) -> tuple[ProfileTable, Split]:
    """A table and its parts: a simulated one has the samples of its kind to fit on, and many more to be judged on."""
    if name == "builtin":
        table = builtin_profile()
        return table, table.split(seed=seed)
    own = KINDS[name].samples
    table = simulate(SimulatedConfig(name, own + TEST_SAMPLES, seed))
    train = round(0.75 * own)
    return table, Split(torch.arange(train), torch.arange(train, own), torch.arange(own, own + TEST_SAMPLES))


def _measured(table: ProfileTable, split: Split, seed: int, compare_objectives: bool) -> dict[str, Any]:
    fitted = torch.cat([split.train, split.validation])
    budgets = default_budgets(table)
    rewards = RewardTable(table, RewardConfig())
    policies: list[dict[str, Any]] = []

    def keep(name: str, chooser: Any, seconds: float, **more: Any) -> None:
        judged = judge(chooser, table, split.test, budgets, rewards)
        row = judged.row(None)
        numbers = {key: row[key] for key in ("utility", "accuracy", "satisfaction_feasible")}
        policies.append({"policy": name, **numbers, "cpu_seconds": seconds, **more})

    def timed(fit: Callable[[], Any]) -> tuple[Any, float]:
        start = time.process_time()
        result = fit()
        return result, time.process_time() - start

    def trained(structure: str, loss: LossConfig | None = None, **changed: Any) -> ControllerTrainer:
        policy, optimiser = GROUPS["policy"][structure], replace(GROUPS["optimiser"][structure], **changed)
        trainer = ControllerTrainer(
            table,
            split,
            policy=policy,
            loss=loss or LossConfig(),
            optimiser=optimiser,
            reward=GROUPS["reward"]["utility"],
            budgets_ms=budgets,
            seed=seed,
        )
        trainer.run()
        return trainer

    baselines, seconds = timed(lambda: make_baselines(table, split, seed, budgets))
    for baseline in baselines:
        keep(baseline.name, baseline, seconds)

    trainer, network_seconds = timed(lambda: trained("auto"))
    config = GROUPS["policy"]["auto"]
    auto, stack_seconds = timed(lambda: fit_stack(table, fitted, trainer.controller, config, budgets, seed))
    guard = None if auto.guard is None else auto.guard.rows()
    keep("auto", auto, network_seconds + stack_seconds, chosen=auto.chosen(), guard=guard)
    keep("auto, no guard", _with_weights(auto, auto.weights), network_seconds + stack_seconds)
    if auto.experts:
        equal = torch.full_like(auto.weights, 1 / len(auto.weights))
        keep("auto, no guard, equal weights", _with_weights(auto, equal), network_seconds + stack_seconds)
    keep("utility network", trainer.controller, network_seconds, stopped_at=trainer.best["iteration"])

    warm, seconds = timed(lambda: trained("utility", iterations=0))
    keep("utility network, regression only", warm.controller, seconds)
    for structure in ("additive", "autoregressive", "independent", "joint"):
        one, seconds = timed(lambda structure=structure: trained(structure))  # type: ignore[misc]
        keep(structure, one.controller, seconds)

    objectives = [
        {"objective": name, **_tuned(warm, loss, table, split, budgets, seed)}
        for name, loss in (OBJECTIVES.items() if compare_objectives else ())
    ]
    return {
        "samples": len(fitted),
        "configurations": table.num_configurations,
        "features": sum(block.shape[1] for block in table.features.values()),
        "policies": policies,
        "objectives": objectives,
    }


def _with_weights(stack: StackedController, weights: Tensor) -> StackedController:
    experts = [expert for expert in stack.experts if isinstance(expert, Expert)]
    return StackedController(stack.network, experts, weights)


class _Trajectory:
    """Utility on the test part at every evaluation, and the CPU seconds of training until then."""

    def __init__(self, trainer: ControllerTrainer, test: Tensor) -> None:
        self._trainer, self._test, self._judging = trainer, test, 0.0
        self._start = time.process_time()
        self.utility: list[float] = []
        self.seconds: list[float] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "Val/Utility" in metrics:
            begun, trainer = time.process_time(), self._trainer
            self.seconds.append(begun - self._start - self._judging)
            judged = judge(trainer.controller, trainer.table, self._test, trainer.limits, trainer.env.rewards)
            self.utility.append(float(judged.utility.mean()))
            self._judging += time.process_time() - begun


def _tuned(
    warm: ControllerTrainer, loss: LossConfig, table: ProfileTable, split: Split, budgets: Tensor, seed: int
) -> dict[str, list[float]]:
    """GRPO alone, from where a warm-up was best: 60 iterations, judged on the test part every 5."""
    trainer = ControllerTrainer(
        table,
        split,
        policy=warm.policy,
        loss=loss,
        optimiser=replace(warm.settings, warmup_iterations=0, iterations=60, evaluate_every=5, patience=0),
        reward=GROUPS["reward"]["utility"],
        budgets_ms=budgets,
        seed=seed,
    )
    trainer.agent.load_state_dict(warm.best["state"])
    trainer.log = trajectory = _Trajectory(trainer, split.test)
    trainer.run()
    return {"utility": trajectory.utility, "seconds": trajectory.seconds}


def main(words: Sequence[str]) -> int:
    """`python experiments/studies/decisions.py key=value …`."""
    try:
        schema = OmegaConf.structured(DecisionsConfig)
        config = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.from_cli(list(words))))
        assert isinstance(config, DecisionsConfig)
        with stopped_by_signals():
            print(f"page: {run(config)}")
    except (InputError, OmegaConfBaseException) as error:
        print(f"decisions: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("decisions: stopped; the same command measures what is missing", file=sys.stderr)
        return status_of(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
