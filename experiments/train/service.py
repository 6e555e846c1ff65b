"""The service experiment: train prices of a millisecond with several seeds, judge them beside tuned rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import torch

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.agents.service.baselines import Decide, Outcome, Service
from knobwise.agents.service.policy import PricePolicy
from knobwise.agents.serving.forecast import forecast_of
from knobwise.agents.serving.own_cost import expected_cost_ms
from knobwise.agents.training.service_trainer import ServiceTrainer
from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.service.arrivals import Traces, TraceSampler
from knobwise.envs.service.torchrl_env import ServiceQueue
from knobwise.experiments.results.run_folder import checkpoint_at
from knobwise.experiments.results.service import service_results
from knobwise.experiments.settings.profiles import read_profile
from knobwise.experiments.settings.service_options import ServiceRun
from knobwise.experiments.train.run import Experiment, keep_best, train_seeds

HELD_OUT, TUNED, JUDGED = 10_001, 10_002, 10_003
"""Seeds of the traces that policies are chosen on, that rules are tuned on, and that all are judged on."""


class ServiceExperiment(Experiment):
    """The trainings of all seeds, all set up before the first is run.

    Raises:
        InputError: also if the checkpoint holds no controller for deadlines, or one of another profile.
    """

    def __init__(self, config: ServiceRun) -> None:
        super().__init__(config, config.threads)
        self.table, self.notes = read_profile(config.profile), []
        path = checkpoint_at(config.checkpoint)
        loaded = load_checkpoint(path)
        forecast = forecast_of(loaded.agent, self.table) if loaded.profile_digest == self.table.digest else None
        if forecast is None:
            raise InputError(f"{path}: was trained on {loaded.profile_name!r}, not on this profile; give profile=…")
        self.fitted = torch.cat([loaded.extra["train_rows"], loaded.extra["validation_rows"]])
        self.test, deadlines = loaded.extra["test_rows"], 2 * default_budgets(self.table)
        self.deadlines_ms = deadlines if config.deadlines_ms is None else torch.tensor(config.deadlines_ms)
        settings = config.optimiser
        about: dict[str, Any] = {"servers": config.servers, "requests": config.requests}
        about |= {"deadlines_ms": self.deadlines_ms, "rows": self.fitted, "loads": config.loads}
        about["cost_ms"] = expected_cost_ms(self.table, experts=False) if config.own_cost else 0.0
        about |= {"batch_size": settings.contexts, "group_size": config.loss.group_size}
        envs = [ServiceQueue(self.table, forecast, seed=seed, **about) for seed in config.seeds]
        self.gap_ms, prices = envs[0].gap_ms, envs[0].prices
        self.service = Service(self.table, forecast, envs[0].service_ms, prices, config.servers, about["cost_ms"])
        self.judged_on = {
            str(load): self.traces([load], self.test, JUDGED + i) for i, load in enumerate(config.judged_loads)
        }
        self.tuned_on = self.traces(config.loads, self.fitted, TUNED)
        self.tuned = self.service.tuned(self.tuned_on)
        held_out = self.traces(config.loads, self.fitted, HELD_OUT)
        about = {"loss": config.loss, "optimiser": settings}
        self.trainers = [
            ServiceTrainer(env, self.service, held_out, self.tuned[1:], seed=seed, **about)
            for env, seed in zip(envs, config.seeds, strict=True)
        ]

    def traces(self, loads: list[Any], rows: torch.Tensor, seed: int) -> Traces:
        """As many traces as are judged at each load."""
        about: dict[str, Any] = {"requests": self.config.requests, "gap_ms": self.gap_ms}
        sampler = TraceSampler(self.table, loads, rows=rows, seed=seed, deadlines_ms=self.deadlines_ms, **about)
        return sampler(self.config.traces)

    def train(self, folder: Path) -> None:
        """Train every seed that is not finished."""
        train_seeds(self.trainers, self.config, folder)

    def judge(self, folder: Path) -> tuple[dict[str, Any], pl.DataFrame]:
        """Every seed's best policy and every rule on the same fresh traces, at every load."""
        best = {
            folder / "checkpoints" / f"seed{seed}": load_checkpoint(folder / "checkpoints" / f"seed{seed}" / "best.pt")
            for seed in self.config.seeds
        }
        agents = [loaded.agent for loaded in best.values()]
        policies = {"price_grpo": [self.service.by_policy(each) for each in agents if isinstance(each, PricePolicy)]}
        rules, tuned = self.rules()
        policies |= {name: [rule] for name, rule in rules.items()}
        outcomes: dict[str, dict[str, list[Outcome]]] = {name: {} for name in policies}
        with progress("judging", len(policies), quiet_s=2) as tick:
            for done, (name, decides) in enumerate(policies.items(), 1):
                for load, traces in self.judged_on.items():
                    free = "static" in name
                    outcomes[name][load] = [self.service.serve(traces, each, free=free) for each in decides]
                tick(done, name)
        scores = {seed: loaded.extra["validation_utility"] for seed, loaded in best.items()}
        kept = keep_best(folder, scores)
        results, decisions = service_results(outcomes, self.config.seeds, self.table)
        results |= {"best_seed": int(kept.name.removeprefix("seed")), "validation_utility": list(scores.values())}
        results |= {"tuned": tuned, "service_ms": self.service.service_ms, "deadlines_ms": self.deadlines_ms.tolist()}
        return results | {"requests": self.config.requests, "servers": self.config.servers}, decisions

    def rules(self) -> tuple[dict[str, Decide], list[dict[str, Any]]]:
        """The rivals, tuned on traces of the training samples; and what was chosen."""
        service, (alone, *pair) = self.service, self.tuned
        rules = {"price_backlog": service.at_price(*pair), "price_single": service.at_price(alone)}
        tuned = [{"policy": "price_backlog", "price": pair[0], "per_waiting": pair[1]}]
        tuned += [{"policy": "price_single", "price": alone, "per_waiting": 0.0}]
        for load in self.config.tuned_at:
            _, *pair = service.tuned(self.traces([load], self.fitted, TUNED))
            name = f"price_backlog_at_{load:g}"
            rules[name] = service.at_price(*pair)
            tuned.append({"policy": name, "price": pair[0], "per_waiting": pair[1]})
        rules |= {"myopic": service.at_price(0.0), "best_static": service.best_static(self.tuned_on)}
        return rules | {"static_by_time_left": service.static_by_time_left(self.fitted)}, tuned
