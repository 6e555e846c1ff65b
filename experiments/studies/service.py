"""Requests that wait for one another: what the price of a millisecond brings, under constant and changing loads.

    python -m knobwise.experiments.studies.service checkpoint=runs/latest key=value …

Tunes rules on top of a controller that was trained on the built-in profile, replays them, and writes docs/service.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.service.baselines import Decide, Service, forecast_of
from knobwise.agents.serving.own_cost import expected_cost_ms
from knobwise.common.checks import at_least
from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.readers.builtin import builtin_profile
from knobwise.experiments.report import words
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.results.statistics import paired
from knobwise.experiments.studies.running import rendered, run_from_words

TUNED, JUDGED = 10_002, 10_003
"""Seeds of the traces that rules are tuned on, and that all are judged on."""
RULE = "price_backlog"
CHANGING = ("ramp 0.3 1.3", "steps 0.3 1.3", "bursts 0.3 1.3")


@dataclass
class ServiceStudyConfig:
    """The settings, each as key=value. Loads are as in `stream.load` of `knobwise evaluate`."""

    checkpoint: str = "runs/latest"
    """The controller, for deadlines: a checkpoint, or the folder of a run."""
    loads: list[Any] = field(default_factory=lambda: [0.3, 0.6, 0.75, 0.9, 1.1, *CHANGING])
    """Loads that the rules are tuned on, one for each trace in turn."""
    judged_loads: list[Any] = field(default_factory=lambda: [0.6, 0.75, 0.9, 1.1, *CHANGING])
    """Loads to judge at."""
    tuned_at: list[float] = field(default_factory=lambda: [0.6, 0.75, 0.9, 1.1])
    """Constant loads that a rule is tuned at, beside the one tuned on `loads`."""
    requests: int = 200
    """Requests in a trace."""
    traces: int = 100
    """Traces to judge on, at each load; rules are tuned on as many."""
    servers: int = 1
    """Servers of the queue."""
    out: str = "docs/service.md"
    """The page."""


def run(config: ServiceStudyConfig) -> list[str]:
    """Tune, judge, and write the page. Raises InputError: the checkpoint holds no controller for deadlines, or one of
    another profile; settings that cannot be used."""
    for name in ("requests", "traces", "servers"):
        at_least(name, getattr(config, name), 1)
    table, path = builtin_profile(), checkpoint_at(config.checkpoint)
    loaded = load_checkpoint(path)
    if loaded.profile_digest != table.digest or "test_rows" not in loaded.extra:
        raise InputError(f"{path}: must be the best.pt of a training on the present profile {table.name!r}")
    fitted = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]])
    # twice the budgets, because a request may have to wait for another one
    about = fitted, 2 * default_budgets(table), config.servers, expected_cost_ms(table, experts=False)
    service, size = Service(table, forecast_of(loaded.agent, table), *about), (config.traces, config.requests)
    rules, tuned = rules_of(service, config)
    utility: dict[str, list[np.ndarray]] = {name: [] for name in rules}
    for number, load in enumerate(config.judged_loads):
        traces = service.traces([load], size[0], JUDGED + number, loaded.extra["test_rows"], size[1])
        for name, decide in rules.items():
            utility[name].append(service.serve(traces, decide, free="static" in name)[:, 0].numpy())
    scores = {name: np.stack([*each, np.mean(each, 0)], 1) for name, each in utility.items()}  # [traces, loads + 1]
    write_text(config.out, service_page(config, service, scores, tuned))
    return []


def rules_of(service: Service, config: ServiceStudyConfig) -> tuple[dict[str, Decide], dict[str, tuple[float, float]]]:
    """Every policy by name, tuned on traces of the training samples; and the prices that were chosen."""
    mixed = service.traces(config.loads, config.traces, TUNED, requests=config.requests)
    alone, *pair = service.tuned(mixed)
    tuned = {RULE: (pair[0], pair[1]), "price_single": (alone, 0.0)}
    for load in config.tuned_at:
        traces = service.traces([load], config.traces, TUNED, requests=config.requests)
        tuned[f"{RULE}_at_{load:g}"] = service.tuned(traces)[1:]
    rules = {name: service.at_price(*prices) for name, prices in tuned.items()} | {"myopic": service.at_price(0.0)}
    statics = {"best_static": service.best_static(mixed), "static_by_time_left": service.static_by_time_left()}
    return rules | statics, tuned


def service_page(
    config: ServiceStudyConfig,
    service: Service,
    scores: dict[str, np.ndarray],
    tuned: dict[str, tuple[float, float]],
) -> str:
    """docs/service.md, from the utility of every policy on every trace, [traces, loads + 1]."""
    loads = [*map(str, config.judged_loads), "mean"]
    over = {
        (name, load): row
        for name, score in scores.items()
        for load, row in zip(loads, paired(scores[RULE][None], score[None], True), strict=True)
    }
    return rendered(
        "service.md.j2",
        config=config,
        service=service,
        loads=loads,
        means={name: dict(zip(loads, score.mean(0), strict=True)) for name, score in scores.items()},
        over=over,
        rule=RULE,
        tuned=tuned,
        policies=sorted(scores, key=lambda name: -scores[name][:, -1].mean()),
        words=words,
    )


if __name__ == "__main__":
    sys.exit(run_from_words("service", ServiceStudyConfig, run, sys.argv[1:]))
