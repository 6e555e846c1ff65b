"""The controller: features and a budget in, a distribution over the configurations that exist out.

In the order of the data: `FeatureNormaliser` and `BudgetEncoding` → trunk → head (`knobwise.agents.heads`) → log-probs
of all C configurations → `ConfigurationCategorical`, which draws actions. Whatever the head, everything after it works
on log-probs over configurations; that is the one interface between structures and the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torchrl.modules import MLP

from knobwise.agents.features import FeatureNormaliser
from knobwise.agents.heads import HEADS
from knobwise.agents.settings import PolicyConfig
from knobwise.envs.budgets import BudgetEncoding
from knobwise.envs.table import ActionIndex, Knob, ProfileTable
from knobwise.losses.functional import entropy, kl_divergence


class ConfigurationCategorical(Distribution):
    """A categorical over the C configurations that exist, whose values are actions (a value index for each knob).

    Args:
        log_probs: [*, C], normalised or not, −inf where a configuration must not be chosen.
        configurations: int64 [C, K], the action of each configuration.
        group_size: G draws belong to one context: `sample` gives [*, G, K] and `log_prob` of it [*, G]. None for no
            group axis: [*, K] and [*].
        index: finds configurations by action; made from `configurations` when None.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.integer_interval(0, torch.iinfo(torch.int64).max)

    def __init__(
        self,
        log_probs: Tensor,
        configurations: Tensor,
        group_size: int | None = None,
        index: ActionIndex | None = None,
    ) -> None:
        self.log_probs = log_probs.log_softmax(-1)
        self.configurations, self.group_size = configurations, group_size
        self.index = index or ActionIndex(configurations)
        group = () if group_size is None else (group_size,)
        super().__init__(log_probs.shape[:-1], torch.Size([*group, configurations.shape[1]]), validate_args=False)

    def sample_index(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw configuration indices, int64 [*sample_shape, *batch, (G)]."""
        count = torch.Size(sample_shape).numel()
        flat = self.log_probs.reshape(-1, self.log_probs.shape[-1]).exp()
        drawn = torch.multinomial(flat, count * (self.group_size or 1), replacement=True)
        group = [] if self.group_size is None else [self.group_size]
        drawn = drawn.reshape(*self.batch_shape, count, *group)
        return drawn.movedim(len(self.batch_shape), 0).reshape((*sample_shape, *self.batch_shape, *group))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            return self.configurations[self.sample_index(sample_shape)]

    rsample = sample
    """Draws of a discrete distribution carry no gradient; the name is there because collectors ask for it."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of actions; −inf for those that do not exist."""
        chosen = self.index(value)
        found = self.log_prob_of_index(chosen.clamp_min(0))
        return found.masked_fill(chosen < 0, -torch.inf)

    def log_prob_of_index(self, index: Tensor) -> Tensor:
        """Log-probability of configuration indices, int64 [*sample_shape, *batch, (G)], in the same shape."""
        if self.group_size is not None:
            return self.log_probs.expand(*index.shape[:-1], -1).gather(-1, index)
        return self.log_probs.expand(*index.shape, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """[*batch], in nats."""
        return entropy(self.log_probs)

    def kl(self, other: ConfigurationCategorical) -> Tensor:
        """KL(self ‖ other), [*batch], in nats."""
        return kl_divergence(self.log_probs, other.log_probs)

    @property
    def mode(self) -> Tensor:
        """The most probable action: [*batch, K], or repeated along the group axis."""
        best = self.configurations[self.log_probs.argmax(-1)]
        return best if self.group_size is None else best.unsqueeze(-2).expand(*self.batch_shape, *self.event_shape)

    deterministic_sample = mode


class Controller(nn.Module):
    """A light MLP with a head over configurations.

    Args:
        knobs: names and values.
        configurations: int64 [C, K].
        normaliser: of the features.
        encoding: of the budget.
        config: the network.
    """

    configurations: Tensor

    def __init__(
        self,
        knobs: Sequence[Knob],
        configurations: Tensor,
        normaliser: FeatureNormaliser,
        encoding: BudgetEncoding,
        config: PolicyConfig,
    ) -> None:
        super().__init__()
        self.knobs, self.config = tuple(knobs), config
        self.register_buffer("configurations", configurations)
        self.index = ActionIndex(configurations)
        self.normaliser, self.encoding = normaliser, encoding
        self.trunk = MLP(
            in_features=normaliser.width + encoding.width,
            out_features=config.hidden,
            num_cells=[config.hidden] * (config.layers - 1),
            activation_class=nn.SiLU,
            dropout=config.dropout,
            activate_last_layer=True,
        )
        self.head = HEADS[config.head](config.hidden, configurations)

    @classmethod
    def for_table(cls, table: ProfileTable, rows: Tensor, config: PolicyConfig) -> Controller:
        """A fresh controller; statistics of features and latencies are taken from these rows (int64 [n]) alone."""
        encoding = BudgetEncoding(table.latency_ms[rows][table.mask[rows]], config.budget_encoding, config.budget_width)
        return cls(table.knobs, table.configurations, FeatureNormaliser.fit(table, rows), encoding, config)

    def forward(self, features: Tensor, budget_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalised features float [*, width], budgets float [*] in ms, mask bool [*, C] → log-probs [*, C]."""
        hidden = self.trunk(torch.cat([features, self.encoding(budget_ms)], -1))
        log_probs: Tensor = self.head(hidden, mask)
        return log_probs

    @torch.no_grad()
    def choose(self, features: Mapping[str, Tensor], budgets_ms: Tensor, mask: Tensor | None = None) -> Tensor:
        """Greedy decisions: feature blocks [n, d], budgets [n] in ms, mask bool [n, C] → configurations int64 [n]."""
        training, device = self.training, self.configurations.device
        self.eval()
        normal = self.features({name: block.to(device) for name, block in features.items()}, len(budgets_ms))
        log_probs = self(normal, budgets_ms.to(device), None if mask is None else mask.to(device))
        self.train(training)
        return log_probs.argmax(-1)

    def features(self, blocks: Mapping[str, Tensor], *shape: int) -> Tensor:
        """Normalised features [*shape, width]; width 0 for a profile that has none."""
        return self.normaliser(blocks) if self.normaliser.sizes else self.normaliser.mean.new_zeros(*shape, 0)


class _FromBlocks(nn.Module):
    """Feature blocks and a budget as they come with a request."""

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self.controller = controller

    def forward(self, budget_ms: Tensor, *blocks: Tensor) -> Tensor:
        named = dict(zip(self.controller.normaliser.sizes, blocks, strict=True))
        log_probs: Tensor = self.controller(self.controller.features(named, *budget_ms.shape), budget_ms)
        return log_probs


class _FromRows(nn.Module):
    """Row numbers of a table and a budget, as they travel in training: features were normalised once, for all rows."""

    all_features: Tensor
    mask: Tensor

    def __init__(self, controller: Controller, table: ProfileTable) -> None:
        super().__init__()
        self.controller = controller
        device = controller.configurations.device
        blocks = {name: block.to(device) for name, block in table.features.items()}
        features = controller.features(blocks, table.num_samples)
        self.register_buffer("all_features", features, persistent=False)
        self.register_buffer("mask", table.mask.to(device), persistent=False)
        self.complete = bool(table.mask.all())

    def forward(self, row: Tensor, budget_ms: Tensor) -> Tensor:
        mask = None if self.complete else self.mask[row]
        log_probs: Tensor = self.controller(self.all_features[row], budget_ms, mask)
        return log_probs


def make_actor(
    controller: Controller, table: ProfileTable | None = None, group_size: int | None = None
) -> ProbabilisticTensorDictSequential:
    """The controller as a TensorDict policy that writes `log_probs`, `action` and `action_log_prob`.

    Args:
        controller: the network.
        table: when given, the policy reads `row` and `budget_ms` and looks features up in this table (training); when
            None it reads the feature blocks by name and `budget_ms` (stepping by hand, deployment).
        group_size: G, number of draws for each context; None for one without a group axis.
    """
    if table is None:
        encode = TensorDictModule(
            _FromBlocks(controller), in_keys=["budget_ms", *controller.normaliser.sizes], out_keys=["log_probs"]
        )
    else:
        encode = TensorDictModule(_FromRows(controller, table), in_keys=["row", "budget_ms"], out_keys=["log_probs"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["log_probs"],
        out_keys=["action"],
        distribution_class=ConfigurationCategorical,
        distribution_kwargs={
            "configurations": controller.configurations,
            "group_size": group_size,
            "index": controller.index,
        },
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    return ProbabilisticTensorDictSequential(encode, draw)
