"""What GRPO adds to the policy where configurations become slower or faster than in the profile.

Machines are drawn as in training (`knobwise.envs.tables.drift`), all of them with drift. The
controller of each seed is told the drift, and decides for all test samples under all judged budgets
with the weights before GRPO and with those that it deploys. Decisions cost nothing. For each run it
prints the mean difference in points of utility, and a 95 % interval over samples, seeds and splits.

    knobwise train experiment=controller seeds=[0,1,2,3,4]
    python experiments/studies/drift.py runs/latest
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch import Tensor

from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.bandit.reward import share_on_time
from knobwise.envs.tables.divisions import divide
from knobwise.envs.tables.drift import drawn_drift
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.evidence.results import read_results
from knobwise.experiments.evidence.statistics import ends_of_means, resampled_means
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.profiles import PROFILES, read_profile
from knobwise.experiments.settings.settings_of_run import group_of_run
from knobwise.experiments.train.judging import before_grpo

Array = NDArray[np.float64]
SIZE = 0.3
"""The largest size of the drift in ln ms: what controllers are trained for."""
MACHINES = 20


def utilities(
    decider: NumpyController,
    table: ProfileTable,
    rows: Tensor,
    budgets_ms: list[float],
    machines: Array,
) -> Array:
    """Return the utility of each test sample, a mean over budgets and machines, [n]."""
    features = {name: block.numpy() for name, block in table.blocks(rows).items()}
    mask = table.mask[rows].numpy()
    measured_ms = table.measurements_ms[rows].numpy()  # [n, C, repeats]
    accuracy = table.accuracy[rows].numpy()
    total = np.zeros(len(rows))
    for offset in machines:
        for budget_ms in budgets_ms:
            limits = np.full(len(rows), budget_ms)
            budget = torch.tensor(budget_ms, dtype=torch.float64)
            chosen = decider.choose(features, limits, mask, (offset, 1.0))
            cells = np.arange(len(rows)), chosen
            took_ms = measured_ms[cells] * np.exp(offset[chosen])[:, None]
            on_time = share_on_time(torch.from_numpy(took_ms), budget)
            total += accuracy[cells] * on_time.numpy()
    return total / (len(machines) * len(budgets_ms))


def main(folder: Path) -> None:
    """Print a line for a run."""
    profile: Any = OmegaConf.to_object(group_of_run(str(folder), "profile", PROFILES))
    table = read_profile(profile)
    budgets_ms = read_results(folder)["budgets_ms"]
    generator = torch.Generator().manual_seed(0)
    # half of the drawn machines are as profiled
    drawn = drawn_drift(table.configurations, SIZE, (4 * MACHINES,), generator)
    assert drawn is not None
    machines = drawn[drawn.abs().amax(1) > 0][:MACHINES].double().numpy()
    division = of_run(str(folder), "split")
    tested = []
    gains = []
    for number in range(max(1, division["repeats"], division["folds"])):
        part = folder / f"split{number}" if number else folder
        test = divide(table, **division, number=number).test
        by_seed = []
        for path in sorted(part.glob("checkpoints/seed*/best.pt")):
            loaded = load_checkpoint(path)
            before = before_grpo(loaded)
            if before is None:
                sys.exit(f"{path}: holds no weights before GRPO")
            about = table, test, budgets_ms, machines
            kept = utilities(before.if_free, *about)
            by_seed.append(utilities(loaded.controller.if_free, *about) - kept)
        tested.append(np.stack([np.full(len(test), number), test.numpy()]))
        gains.append(np.stack(by_seed))
    gain = np.concatenate(gains, 1)
    splits = np.concatenate(tested, 1)
    # samples are numbered from 0
    splits[1] = np.unique(splits[1], return_inverse=True)[1]
    (interval,) = ends_of_means([gain], resampled_means([gain], splits=splits))
    low, high = (100 * bound for bound in interval)
    name = folder.resolve().name
    print(f"{name:16} {100 * gain.mean():+.2f} [{low:+.2f}, {high:+.2f}]", flush=True)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(Path(argument))
