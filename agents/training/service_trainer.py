"""The training of a price policy by GRPO: a group is G rollouts of one trace, with equal arrivals and measurements."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDictBase

from knobwise.agents.checkpoint import Loaded
from knobwise.agents.judging.evaluation import LOGGED
from knobwise.agents.service.baselines import Service
from knobwise.agents.service.policy import OBSERVED, SPREAD, PricePolicy
from knobwise.agents.service.settings import ServiceLossConfig
from knobwise.agents.training.loop import Trainer, seeded
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Stage
from knobwise.envs.service.arrivals import Traces
from knobwise.envs.service.torchrl_env import ServiceQueue
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.losses import GRPOLoss


class ServiceTrainer(Trainer):
    """Trains one price policy with one seed. A context is a trace; its requests are groups of their own: rewards are
    utilities to come, compared with those of the other rollouts at the same request.

    Args:
        env: of P = `optimiser.contexts` traces and G = `loss.group_size` rollouts.
        service: the same for judging.
        rule: the price and the price per waiting request that training starts from, see `Service.tuned`.
        held_out: the traces that the best policy is chosen on.
    """

    agent: PricePolicy
    reference: PricePolicy
    env: ServiceQueue
    table: ProfileTable
    loss: ServiceLossConfig
    judged_by = "utility"
    trained_on = "on another profile or with other settings"

    def __init__(
        self,
        env: ServiceQueue,
        service: Service,
        held_out: Traces,
        rule: tuple[float, float],
        *,
        loss: ServiceLossConfig | None = None,
        optimiser: OptimiserConfig | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.table, self.service, self.held_out = service.table, service, held_out
        self.loss, settings = loss or ServiceLossConfig(), optimiser or OptimiserConfig()
        with seeded(seed, "cpu"):
            policy = PricePolicy(env.prices, env.service_ms, rule).eval()
            reference, actor = copy.deepcopy(policy).requires_grad_(False), policy.actor()
            about = self.loss.of_grpo() | {"kl_to_ref_coeff": self.loss.kl_to_ref_coeff or 0.0}
            self.grpo = GRPOLoss(actor, **about, functional=False)
            stored = [*OBSERVED, "waited_ms", "action", "action_log_prob", ("next", "reward")]
            about_stage = "GRPO", self._by_request, settings.iterations, settings.lr, self._prepare
            stage = Stage(*about_stage, patience=settings.patience)
            shape = (*env.batch_size, env.contexts.requests)
            options |= {"stored": stored, "shape": shape, "seed": seed}
            super().__init__(policy, reference, env, actor, [stage], settings, **options)
        self.collector.postproc = lambda data: self._with_returns(data.select(*stored))  # whole traces, [P, G, T]
        self._resumable = {"loss": asdict(self.loss), "optimiser": asdict(settings), "loads": repr(env.contexts.loads)}

    def _with_returns(self, traces: TensorDictBase) -> TensorDictBase:
        """Rewards [P, G, T] become discounted utilities to come; with one server up to the next request that no rollout
        of its trace lets wait: from there on all are in the same state, whatever was done before."""
        utility, to_come = (traces["next", "reward"].squeeze(-1).clone() for _ in range(2))
        busy = (traces["waited_ms"] > 0).any(1, keepdim=True) | (self.env.servers > 1)
        for place in range(utility.shape[-1] - 2, -1, -1):
            to_come[..., place] += self.loss.discount * busy[..., place + 1] * to_come[..., place + 1]
        return traces.set("utility", utility).set(("next", "reward"), to_come)

    def _prepare(self, share: float, watched: bool) -> None:
        """What is best for draws that vary is not best for the prices at their middle, so they vary less and less."""
        self.agent.spread = self.reference.spread = SPREAD[0] + (SPREAD[1] - SPREAD[0]) * share
        self.grpo.diagnostics = watched

    def _by_request(self, minibatch: TensorDictBase) -> TensorDictBase:
        """The loss of traces [P, G, T], each request a context with its own group."""
        requests = minibatch.transpose(1, 2).flatten(0, 1)
        with torch.no_grad():
            start = self.reference(*(requests[name] for name in OBSERVED)).log_softmax(-1)
        likely = start.gather(-1, requests["action"].unsqueeze(-1)).squeeze(-1)
        return self.grpo(requests.set("reference_log_prob", likely))

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """The most probable prices."""
        outcome = self.service.serve(self.held_out, self.service.by_policy(self.agent))
        utility, accuracy, latency, waited, on_time = (float(each.mean()) for each in outcome)
        metrics = {"Utility": utility, "Accuracy_Mean": accuracy, "Latency_Mean": latency, "Waited_Mean": waited}
        return utility, metrics | {"Budget_Violation_Rate": 1 - on_time}

    def _metrics(self, data: TensorDictBase, outputs: TensorDictBase) -> Mapping[str, float]:
        """What the drawn prices got, and the outputs of the loss, under their logged names."""
        prices, utility = self.agent.prices[data["action"]], data["utility"].mean(-1)
        metrics = {"Reward_Mean": utility.mean(), "Reward_Std": utility.std(), "Price_Mean": prices.mean()}
        metrics |= {name: outputs[key] for key, name in LOGGED.items() if key in outputs}
        return {f"Train/{name}": float(value) for name, value in metrics.items()} | {"Train/LR": self._learning_rate()}

    def provenance(self) -> dict[str, Any]:
        """How good the policy was on the held-out traces."""
        return {"validation_utility": self.best["score"], "iteration": self.best["iteration"]}

    def training_state(self) -> dict[str, Any]:
        return super().training_state() | {"settings": self._resumable}

    def _restore(self, loaded: Loaded, state: Mapping[str, Any]) -> bool:
        if not isinstance(loaded.agent, PricePolicy) or state.get("settings") != self._resumable:
            return False
        self.agent.load_state_dict(loaded.agent.state_dict())
        return True
