"""The distribution that a controller draws from, whatever its structure: a categorical over the configurations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from knobwise.envs.tables.profile_table import ActionIndex
from knobwise.losses.functional import entropy, kl_divergence


class ConfigurationCategorical(Distribution):
    """A categorical over the C configurations that exist, whose values are actions (a value index for each knob).

    Args:
        log_probs: [*, C], −inf where a configuration must not be chosen.
        configurations: int64 [C, K], the action of each configuration.
        group_size: G draws belong to one context: `sample` gives [*, G, K] and `log_prob` of it [*, G]. None for no
            group axis: [*, K] and [*].
        index: finds configurations by action; made from `configurations` when None.
        normalised: whether the probabilities are known to sum to 1, as those of the heads do.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    support = constraints.integer_interval(0, torch.iinfo(torch.int64).max)

    def __init__(
        self,
        log_probs: Tensor,
        configurations: Tensor,
        group_size: int | None = None,
        index: ActionIndex | None = None,
        normalised: bool = False,
    ) -> None:
        self.log_probs = log_probs if normalised else log_probs.log_softmax(-1)
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
        if self.group_size is None:
            return self.log_probs.expand(*index.shape, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        samples = index.shape[: -1 - len(self.batch_shape)]
        return (self.log_probs.expand(*samples, *self.log_probs.shape) if samples else self.log_probs).gather(-1, index)

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
