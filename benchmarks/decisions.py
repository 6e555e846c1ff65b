"""How long it takes, and how much memory, to judge, write and summarise 10⁷ decisions.

A simulated profile (27 configurations, no features), 5 seeds of a controller and 13 baselines at 5 budgets; all but
budget-aware static and the oracle choose at random. Prints seconds of wall time for deciding and summarising, and for
writing, the size of decisions.parquet, and the peak memory of the process.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from knobwise.agents.judging.baselines import BudgetAwareStatic, Oracle, Random
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import RewardConfig
from knobwise.envs.simulated.calibrated import CalibratedConfig, simulate_calibrated
from knobwise.experiments.results.controllers import judge_deadlines
from knobwise.experiments.results.decisions import FILE, write_decisions

SEEDS, BASELINES, BUDGETS = 5, 13, 5


def peak_memory() -> float:
    """GiB, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(decisions: int) -> None:
    samples = decisions // (BUDGETS * (SEEDS + BASELINES))
    table = simulate_calibrated(CalibratedConfig(("text_vqa",), samples, grid="27", image_width=0, language_width=0))
    rows = torch.arange(table.num_samples)
    baselines = [Random(seed) for seed in range(SEEDS, SEEDS + BASELINES - 2)]
    for number, baseline in enumerate(baselines):
        baseline.name = f"baseline {number}"
    before, start = peak_memory(), time.perf_counter()
    _, frame = judge_deadlines(
        table,
        rows,
        default_budgets(table),
        RewardTable(table, RewardConfig()),
        [Random(seed) for seed in range(SEEDS)],
        list(range(SEEDS)),
        [BudgetAwareStatic(table, rows), *baselines, Oracle(table, rows)],
    )
    judged = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_decisions(folder, frame)
        written = time.perf_counter()
        size = (Path(folder) / FILE).stat().st_size / 1024**2
    print(f"{len(frame):,} decisions: judged and summarised in {judged - start:.0f} s, written in", end=" ")
    print(f"{written - judged:.0f} s ({size:.0f} MiB); peak memory {peak_memory():.2f} GiB ({before:.2f} before)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10**7)
