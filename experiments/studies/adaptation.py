"""How many timed cells does a controller need on other hardware? → docs/adaptation.md

python experiments/studies/adaptation.py run=runs/latest               # on simulated hardware
python experiments/studies/adaptation.py timed=profiles/there/table.parquet   # on hardware where all was measured
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from knobwise.agents.checkpoint import Loaded, load_checkpoint
from knobwise.agents.judging.baselines import BudgetAwareStatic
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.serving.adaptation import adapted, cells_to_time, decision_weights, fit_offsets
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets, log_measured
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.readers.long_table import read_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.studies.decisions import Mean
from knobwise.experiments.studies.running import rendered, run_from_words

COUNTS = (0, 10, 30, 100, None)
"""Numbers of timed cells; None for all cells of the samples that the controller was fitted on."""
WAYS = ("offsets", "random", "factor", "static")
"""The controller with an offset for each configuration, from chosen or random cells; with one factor; static."""


@dataclass
class AdaptationConfig:
    """The settings, each as key=value."""

    run: str = "runs/latest"
    """A finished run on the built-in profile; its seeds take turns."""
    timed: str | None = None
    """The built-in profile measured on other hardware, as a long table; None simulates hardware."""
    machines: int = 12
    """How many machines are simulated, or with `timed` how often cells are chosen."""
    knob: float = 0.25
    """Standard deviation of a simulated offset of ln ms, for each value of a knob."""
    configuration: float = 0.05
    """The same for each configuration."""
    jitter: float = 0.05
    """The same for each timed cell."""
    out: str = "docs/adaptation.md"
    """The page."""


def run(config: AdaptationConfig) -> list[str]:
    """Adapt and judge on every machine, and write the page. Raises InputError: no run on the built-in profile."""
    table = builtin_profile()
    timed = None if config.timed is None else replace(read_long_table(config.timed), features=table.features)
    loaded = [load_checkpoint(path) for path in sorted(Path(config.run).glob("checkpoints/seed*/best.pt"))]
    if not loaded or any(each.profile_digest != table.digest for each in loaded):
        raise InputError(f"run={config.run}: holds no finished training on the built-in profile")
    if timed is not None and (timed.sample_ids, timed.knobs) != (table.sample_ids, table.knobs):
        raise InputError(f"timed={config.timed}: has other samples or configurations than the built-in profile")
    cases = []
    with progress("machines", config.machines) as tick:
        for number in range(config.machines):
            machine = _simulated(table, config, number) if timed is None else (timed, timed)
            cases.append(measure(loaded[number % len(loaded)], table, *machine, number))
            tick(number + 1, "")
    means = {key: Mean.over(case[key] for case in cases) for key in cases[0]}
    gains = {key: Mean.over(100 * (case[key] - case["factor", 30]) for case in cases) for key in cases[0]}
    page = rendered("adaptation.md.j2", config=config, means=means, gains=gains, COUNTS=COUNTS, WAYS=WAYS)
    print(page)
    write_text(config.out, page)
    return []


def _simulated(table: ProfileTable, config: AdaptationConfig, seed: int) -> tuple[ProfileTable, ProfileTable]:
    """The profile of a simulated machine, and the same with the jitter of measuring."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randn(1, generator=generator) + config.configuration * torch.randn(
        table.num_configurations, generator=generator
    )
    for knob, values in zip(table.knobs, table.configurations.T, strict=True):
        offsets += config.knob * torch.randn(len(knob.values), generator=generator)[values]
    jitter = config.jitter * torch.randn(table.latency_ms.shape, generator=generator)
    machine = replace(table, latency_ms=table.latency_ms * offsets.exp(), repeats_ms=None)
    return machine, replace(machine, latency_ms=machine.latency_ms * jitter.exp())


def measure(
    loaded: Loaded, table: ProfileTable, machine: ProfileTable, timed: ProfileTable, seed: int
) -> dict[tuple[str, int | None], float]:
    """Mean utility over the test samples and the default budgets of a machine, by `WAYS` and `COUNTS`."""
    agent: Any = loaded.controller
    fitted, test = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]]), loaded.extra["test_rows"]
    budgets_ms, static = default_budgets(machine), BudgetAwareStatic(table, fitted)
    weights = decision_weights(agent, table, fitted[::4], default_budgets(table))
    every = table.mask[fitted].nonzero()
    listed = cells_to_time(table.configurations, table.mask[fitted], weights, max(filter(None, COUNTS)), seed)
    drawn = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))]
    ratios = log_measured(timed.latency_ms[fitted]).double() - log_measured(table.latency_ms[fitted]).double()
    utilities = {}
    for count in COUNTS:
        for way in WAYS:
            rows, chosen = (every if count is None else drawn[:count] if way == "random" else listed[:count]).T
            offsets = fit_offsets(table.configurations, chosen, ratios[rows, chosen]).mean
            if way == "factor":
                offsets = ratios[rows, chosen].median().nan_to_num().expand_as(offsets)
            policy = static.scaled(offsets.exp()) if way == "static" else adapted(agent, offsets)
            utilities[way, count] = judge(policy, machine, test, budgets_ms).metrics()["Utility"]
    return utilities


main = functools.partial(run_from_words, "adaptation", AdaptationConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
