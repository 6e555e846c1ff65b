"""How many timed cells a controller needs on other hardware → docs/adaptation.md

python experiments/studies/adaptation.py                                # on simulated machines
python experiments/studies/adaptation.py timed=profiles/there/table.parquet   # where the whole profile was measured
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
from knobwise.agents.serving.adaptation import Offsets, Scales, adapted, cells_to_time, decision_weights, fit_offsets
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets, log_measured
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.envs.readers.long_table import read_long_table
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.experiments.deploy.adapt import REQUESTS
from knobwise.experiments.results.run_folder import STUDENT
from knobwise.experiments.studies.running import Mean, rendered, run_from_words

SIMULATED = Scales(knob=0.25, configuration=0.05, noise=0.05)
"""What simulated machines are drawn from; their overall speed has a standard deviation of 1 in ln ms."""
COUNTS = (0, 10, 30, 100, None)
"""Numbers of timed cells; None for all of the samples that the controller was fitted on."""
WAYS = ("offsets", "random", "factor", "static")
"""The controller with offsets, of listed or of random cells, or with one factor; budget-aware static with offsets."""


@dataclass
class AdaptationConfig:
    """The settings, each as key=value."""

    run: str = "runs/latest"
    """A finished run on the built-in profile; what its seeds deploy takes turns."""
    timed: str | None = None
    """The built-in profile measured on other hardware, a long table; None simulates machines."""
    machines: int = 12
    """How many machines are simulated, or with `timed` how often cells are drawn."""
    out: str = "docs/adaptation.md"
    """The page."""


def run(config: AdaptationConfig) -> list[str]:
    """Adapt and judge, and write the page. Raises InputError: no run on the built-in profile, other cells."""
    table = builtin_profile()
    folders = sorted(Path(config.run).glob("checkpoints/seed*"))
    loaded = [load_checkpoint(each / (STUDENT if (each / STUDENT).exists() else "best.pt")) for each in folders]
    if not loaded or any(each.profile_digest != table.digest for each in loaded):
        raise InputError(f"run={config.run}: holds no finished training on the built-in profile")
    timed = None if config.timed is None else replace(read_long_table(config.timed), features=table.features)
    if timed is not None and (timed.sample_ids, timed.knobs) != (table.sample_ids, table.knobs):
        raise InputError(f"timed={config.timed}: has other samples or configurations than the built-in profile")
    cases = []
    with progress("machines", config.machines) as tick:
        for seed in range(config.machines):
            draws = torch.Generator().manual_seed(seed)
            machine, jitter = (timed, 0.0) if timed else (simulated(table, draws), SIMULATED.noise)
            cases.append(measure(loaded[seed % len(loaded)], table, machine, jitter, draws))
            tick(seed + 1, "")
    means = {key: Mean.over(case[key] for case in cases) for key in cases[0]}
    gains = {key: Mean.over(100 * (case[key] - case["factor", 30]) for case in cases) for key in cases[0]}
    missing = Mean.over(100 * (case["offsets", None] - case["offsets", 30]) for case in cases)
    constants = {"counts": COUNTS, "ways": WAYS, "simulated": SIMULATED}
    figures = {"means": means, "gains": gains, "missing": missing}
    write_text(config.out, rendered("adaptation.md.j2", config=config, **figures, **constants))
    return []


def simulated(table: ProfileTable, generator: torch.Generator) -> ProfileTable:
    """The profile of a simulated machine, without jitter."""
    offsets = torch.randn(1, generator=generator)
    offsets = offsets + SIMULATED.configuration * torch.randn(table.num_configurations, generator=generator)
    for knob, values in zip(table.knobs, table.configurations.T, strict=True):
        offsets += SIMULATED.knob * torch.randn(len(knob.values), generator=generator)[values]
    return replace(table, latency_ms=table.latency_ms * offsets.exp(), repeats_ms=None)


def measure(
    loaded: Loaded, table: ProfileTable, machine: ProfileTable, jitter: float, generator: torch.Generator
) -> dict[tuple[str, int | None], float]:
    """Mean utility over the test samples and the default budgets of a machine, by `WAYS` and `COUNTS`; ln ms of a timed
    cell has a standard deviation of `jitter`."""
    agent: Any = loaded.controller
    fitted = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]])
    fitted = fitted[torch.randperm(len(fitted), generator=generator)]
    ratios = log_measured(machine.latency_ms[fitted]) - log_measured(table.latency_ms[fitted])
    ratios = (ratios + jitter * torch.randn(ratios.shape, generator=generator)).double()
    some = fitted[:REQUESTS]
    x = agent.features({name: block[some] for name, block in table.features.items()}, len(some))
    weights = decision_weights(agent, table, some, default_budgets(table))
    every, static = table.mask[fitted].nonzero(), BudgetAwareStatic(table, fitted)
    listed = cells_to_time(table.configurations, table.mask[fitted], weights, max(filter(None, COUNTS)))
    drawn = every[torch.randperm(len(every), generator=generator)]
    utilities = {}
    for count in COUNTS:
        for way in WAYS:
            rows, chosen = (every if count is None else (drawn if way == "random" else listed)[:count]).T
            offsets = fit_offsets(table.configurations, chosen, ratios[rows, chosen])
            if way == "factor" or count == 0:  # without cells nothing is known, and nothing changes
                factor = ratios[rows, chosen].median().nan_to_num().expand_as(offsets.mean)
                offsets = Offsets(factor, torch.zeros_like(factor), 0.0)
            policy = adapted(agent, offsets, x)
            if way == "static":
                policy = static.scaled(offsets.mean.exp())
            judged = judge(policy, machine, loaded.extra["test_rows"], default_budgets(machine))
            utilities[way, count] = float(judged.utility.mean())
    return utilities


main = functools.partial(run_from_words, "adaptation", AdaptationConfig, run)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
