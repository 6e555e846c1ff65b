"""A controller as a TensorDict policy: what goes in, by name, what is drawn, and what is written down.

In training contexts are row numbers of a table; stepping by hand and in deployment they are feature blocks.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    composite_lp_aggregate,
)
from torch import Tensor, nn

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.distributions import ConfigurationCategorical, KnobCategoricals
from knobwise.agents.controller.networks import KnobNetwork, Outcomes, UtilityNetwork, ValueHead
from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.configurations.replay import ACTIONS
from knobwise.envs.tables.profile_table import ProfileTable

if TYPE_CHECKING:
    from knobwise.agents.serving.knob_policy import KnobPolicy
    from knobwise.agents.stack.priced_policy import PricedChooser
    from knobwise.agents.stack.stacked_controller import StackedController
OUTCOMES = "outcomes"
"""Where a tensordict may hold the `Outcomes` that were predicted for its rows, as a non-tensor."""


class _FromBlocks(nn.Module):
    """Requests as they come: limits [*] or [*, 1], feature blocks [*, d], and where it is known what was profiled a
    mask [*, C], bool or int8. For a stack with a table: rows of it and limits."""

    def __init__(self, policy: Controller | StackedController, table: ProfileTable | None = None) -> None:
        super().__init__()
        self.policy, self.table = policy, table

    def forward(self, *inputs: Any) -> Tensor:
        """Log-probs [*, C]; of a stack 0 for its decision and −inf for the others."""
        limit, blocks, mask = self._read(*inputs)
        if isinstance(self.policy, Controller):
            return self.policy(self.policy.features(blocks, *self.policy.requests(limit)), limit, mask)
        flat = {name: block.reshape(limit.numel(), -1) for name, block in blocks.items()}
        mask = None if mask is None else mask.reshape(limit.numel(), -1)
        chosen = self.policy.choose(flat, limit.reshape(-1), mask).to(limit.device).reshape(*limit.shape, 1)
        impossible = torch.full((*limit.shape, len(self.policy.configurations)), -torch.inf, device=limit.device)
        return impossible.scatter(-1, chosen, 0.0)

    def _read(self, first: Any, *others: Any) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        if self.table is not None:
            row, limit = first.cpu(), others[0].reshape(first.shape)
            return limit.float(), {name: x[row] for name, x in self.table.features.items()}, self.table.mask[row]
        limit, (*features, mask) = first, others
        if limit is None:
            raise InputError(f"the tensordict lacks {self.policy.limit_key!r}, each request's limit in ms")
        blocks = {name: x for name, x in zip(self.policy.normaliser.sizes, features, strict=True) if x is not None}
        pair = bool(getattr(self.policy, "cost", ""))
        if not pair and any(x is not None and x.ndim == limit.ndim for x in (*blocks.values(), mask)):
            limit = limit.squeeze(-1)
        return limit.float(), blocks, None if mask is None else mask.bool()


class _FromRows(nn.Module):
    """Row numbers of a table and a limit, as they travel in training: features were normalised once, for all rows.
    Contexts [*] belong to the members in turn: in a flat batch number i to member i mod M."""

    all_features: Tensor
    mask: Tensor

    def __init__(self, controller: Controller, table: ProfileTable) -> None:
        super().__init__()
        self.controller, self.members = controller, controller.config.members
        device = controller.configurations.device
        blocks = {name: block.to(device) for name, block in table.features.items()}
        self.register_buffer("all_features", controller.features(blocks, table.num_samples), persistent=False)
        self.register_buffer("mask", table.mask.to(device), persistent=False)
        self.complete = bool(table.mask.all())

    def by_member(self, contexts: Tensor, *each: int) -> Tensor:
        """[*, *each] → [M, n, *each]."""
        return contexts.reshape(-1, self.members, *each).transpose(0, 1)

    def encode(self, row: Tensor) -> Tensor:
        """int64 [*] → features [M, n, width]."""
        return nn.functional.embedding(self.by_member(row), self.all_features)

    def forward(self, row: Tensor, limit: Tensor, outcomes: Outcomes | None = None) -> Tensor:
        """Log-probs [*, C]; from the outcomes of these rows where they are predicted already."""
        mask = None if self.complete else self.mask[self.by_member(row)]
        limits, network = self.by_member(limit.float(), *limit.shape[row.ndim :]), self.controller.network
        if outcomes is not None and isinstance(network, UtilityNetwork):
            log_probs = network.log_probs(outcomes, limits, mask)
        else:
            log_probs = network(self.encode(row), limits, mask)
        return log_probs.transpose(0, 1).reshape(*row.shape, -1)


class OutcomesOfRows(TensorDictModuleBase):
    """What a `UtilityNetwork` predicts for row numbers of a table: reads `row`, writes what `RegressionLoss` reads, and
    `OUTCOMES`, from which an `Actor` goes on."""

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self.rows: _FromRows = actor.module[0].module
        if self.rows.controller.cost:
            self.out_keys = [*self.out_keys, "log_cost"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        row, network = tensordict["row"], self.rows.controller.network
        assert isinstance(network, UtilityNetwork)
        outcomes = network.outcomes(self.rows.encode(row))
        tensordict.set_non_tensor(OUTCOMES, outcomes)
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key).transpose(0, 1).reshape(*row.shape, -1)
        return tensordict


class Actor(ProbabilisticTensorDictSequential):
    """Encodes and draws. Asked for a distribution alone, as in training, it writes nothing down on the way; and where
    the tensordict holds `OUTCOMES`, the network does not predict them again.

    `trainable` is False of a policy that decides without probabilities."""

    trainable = True

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        encode, draw = self.module
        inputs = [tensordict.get(key, None) for key in encode.in_keys]
        if OUTCOMES in tensordict:
            inputs.append(tensordict.get_non_tensor(OUTCOMES))
        return draw.distribution_class(encode.module(*inputs), **draw.distribution_kwargs)


class Behaviour(TensorDictModuleBase):
    """The policy that collects: draws, and writes down what `GRPOLoss` has to know of the moment of drawing.

    Writes `action` int64 [P, G, K], `configuration` int64 [P, G], and for `sampled` `action_log_prob` and
    `reference_log_prob` [P, G], for `exact` `behaviour_log_probs` and `reference_log_probs` [P, C]; with a `critic`
    also `state_value` [P, 1].

    Attributes:
        with_reference: whether the reference is asked at all; off where neither a penalty nor a log needs it is faster.
        with_log_probs: off for a warm-up that learns from the table alone; then the network is not asked either.
        drawing: off where no loss and no log needs draws; the action is then the first that was profiled.
    """

    def __init__(self, actor: Actor, reference: Actor, objective: str, critic: TensorDictModule | None = None) -> None:
        super().__init__()
        self.in_keys, self.out_keys = actor.in_keys, ["action"]
        self.actor, self.reference, self.objective = actor, reference, objective
        self.critic = critic
        self.with_reference = self.with_log_probs = self.drawing = True

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        exact, policies = self.objective == "exact", {}
        if self.with_log_probs or self.drawing:
            policies["behaviour_log_probs" if exact else "action_log_prob"] = self.actor.get_dist(tensordict)
        if self.with_reference:
            policies["reference_log_probs" if exact else "reference_log_prob"] = self.reference.get_dist(tensordict)
        encode, draw = self.actor.module
        group_size, configurations = (draw.distribution_kwargs[key] for key in ("group_size", "configurations"))
        if self.drawing:
            index = next(iter(policies.values())).sample_index()
        else:
            index = encode.module.mask[tensordict["row"]].int().argmax(-1)
            index = index if group_size is None else index.unsqueeze(-1).expand(*index.shape, group_size)
        tensordict["action"], tensordict["configuration"] = configurations[index], index
        for key, policy in policies.items():
            tensordict[key] = policy.log_probs if exact else policy.log_prob_of_index(index)
        return tensordict if self.critic is None else self.critic(tensordict)


def make_critic(agent: Controller, table: ProfileTable) -> TensorDictModule:
    """Return a value network that reads `row` and the limit, as the actor does, and writes `state_value` [*, 1].

    It has layers of its own, which begin as a copy of the agent's.

    Raises:
        InputError: an agent that is not a categorical for each knob.
    """
    critic = copy.deepcopy(agent)
    if not isinstance(critic.network, KnobNetwork):
        raise InputError("loss=ppo: trains a categorical for each knob; give policy=independent")
    critic.network.head = ValueHead(agent.config.members, agent.config.hidden)
    rows = _FromRows(critic.to(agent.configurations.device), table)
    return TensorDictModule(rows, in_keys=["row", agent.limit_key], out_keys=["state_value"])


def make_actor(
    agent: Controller | StackedController | PricedChooser | KnobPolicy,
    table: ProfileTable | None = None,
    group_size: int | None = None,
    *,
    action: str = "knobs",
    separate: bool = False,
) -> Actor:
    """A controller, also `load_checkpoint(path).controller`, as a TensorDict policy that writes `log_probs`, `action`
    and `action_log_prob`.

    It draws under `ExplorationType.RANDOM`, and otherwise takes the most probable. A `StackedController` decides
    without a distribution, by `choose`: its policy is deterministic (`log_probs` are 0 and −inf) and writes no log-prob
    of the action. Of a `PricedChooser` it is the policy inside, at the worth of each request; calibrated prices and the
    guard are for mean budgets. Of what `knobwise.load` gives it is the controller inside.

    Args:
        table: when given, the policy reads `row` and the limit (`budget_ms`, `worth_ms` or `worths`), looks features up
            in this table, and keeps to what was profiled there; contexts belong to the members of an ensemble in turn,
            as in training. When None it reads the limit, the feature blocks by name and, where there is a `mask`, keeps
            to it; all members decide together (stepping by hand, deployment).
        group_size: G, number of draws for each context; None for one without a group axis.
        action: `knobs`, int64 [*, (G), K], or `configuration`, int64 [*, (G)], as in the environment.
        separate: each knob under its own key (`max_crops`, …), int64 [*, (G)], in place of `action`, as in the
            environment under `action_keys="knobs"`; see `KnobCategoricals`. Log-probs are `max_crops_log_prob`, …;
            if `composite_lp_aggregate` is on here and where it draws, there is their sum too, `action_log_prob`.

    Raises:
        InputError: an agent that is not a controller, `separate` where an action is a configuration.
    """
    one_of("action", action, ACTIONS)
    if separate and action != "knobs":
        raise InputError(f"separate=True: gives each knob its own key; leave out action={action}")
    policy = _decider(agent)
    drawn, by_knobs, limit = isinstance(policy, Controller), action == "knobs", policy.limit_key
    encoder = _FromRows(policy, table) if drawn and table is not None else _FromBlocks(policy, table)
    keys = [limit, *policy.normaliser.sizes, "mask"] if table is None else ["row", limit]
    encode = TensorDictModule(encoder, in_keys=keys, out_keys=["log_probs"])
    configurations = policy.configurations
    names = [knob.name for knob in policy.knobs]
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=names if separate else ["action"],
        distribution_class=KnobCategoricals if separate else ConfigurationCategorical,
        distribution_kwargs={
            "configurations": configurations if by_knobs else torch.arange(len(configurations)).to(configurations),
            "group_size": group_size,
            "index": policy.index if by_knobs else None,
            "normalised": True,
            **({"names": names} if separate else {}),
        },
        return_log_prob=drawn,
        log_prob_key=None if separate and not composite_lp_aggregate() else "action_log_prob",
    )
    actor = Actor(encode, draw)
    actor.trainable = drawn
    return actor


def _decider(agent: Any) -> Any:
    """Return the controller or stack inside an agent. Raises InputError: there is none."""
    for inner in ("agent", "chooser"):
        agent = getattr(agent, inner, agent)
    if not hasattr(agent, "limit_key"):
        kind = type(agent).__name__
        raise InputError(f"make_actor: {kind} is not a controller; give what knobwise.load or load_checkpoint returns")
    return agent
