"""Distributions of a controller: a categorical over configurations, with all knobs in one action
or each under its own key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, composite_lp_aggregate
from torch import Tensor
from torch.distributions import Categorical, Distribution, constraints

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ActionIndex, Knob
from knobwise.losses.functional import entropy


class ConfigurationCategorical(Distribution):
    """A categorical over the C configurations that exist.

    Its values are actions: a value index for each knob.

    Args:
        log_probs: [*, C], −inf where a configuration must not be chosen.
        configurations: int64 [C, K], the action of each configuration. Or int64 [C], where an
            action is a single number; values then lack the axis K.
        group_size: G, the number of draws for one context. `sample` then gives [*, G, K], and
            `log_prob` of it [*, G]. None means no group axis: [*, K] and [*].
        index: finds configurations by action, faster than by comparing with all of them.
        normalised: True if the probabilities are known to sum to 1.
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
        # a module that was moved leaves the settings of its distribution behind
        self.configurations = configurations.to(log_probs.device)
        self.group_size = group_size
        self.index = index or self._match
        self._group = torch.Size(() if group_size is None else (group_size,))
        super().__init__(
            log_probs.shape[:-1], self._group + configurations.shape[1:], validate_args=False
        )

    def _match(self, value: Tensor) -> Tensor:
        """Return configuration indices of actions, −1 for actions that do not exist.

        This is slower than an `ActionIndex`.
        """
        # [*, K] with [C, K] → [*, C]
        same = value.unsqueeze(-self.configurations.ndim) == self.configurations
        if self.configurations.ndim > 1:
            same = same.all(-1)
        return torch.where(same.any(-1), same.int().argmax(-1), -1)

    def sample_index(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw configuration indices, int64 [*sample_shape, *batch, (G)]."""
        count = torch.Size(sample_shape).numel()
        # all draws of a context at once
        flat = self.log_probs.reshape(-1, self.log_probs.shape[-1]).exp()
        drawn = torch.multinomial(flat, count * self._group.numel(), replacement=True)
        # [*batch, samples, (G)] → [*samples, *batch, (G)]
        drawn = drawn.reshape(*self.batch_shape, count, *self._group)
        return drawn.movedim(len(self.batch_shape), 0).reshape(
            (*sample_shape, *self.batch_shape, *self._group)
        )

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with torch.no_grad():
            return self.configurations[self.sample_index(sample_shape)]

    rsample = sample
    """Collectors call it by this name. The draws are discrete, so they carry no gradient."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log-probabilities of actions; −inf for those that do not exist."""
        # an action that does not exist has index −1
        index = self.index(value)
        return self.log_prob_of_index(index.clamp_min(0)).masked_fill(index < 0, -torch.inf)

    def log_prob_of_index(self, index: Tensor) -> Tensor:
        """Return log-probabilities of configuration indices, in their shape.

        Args:
            index: int64 [*sample_shape, *batch, (G)].
        """
        if self.group_size is None:
            log_probs = self.log_probs.expand(*index.shape, -1)
            return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        # the G draws of a group are looked up together, along the axis of configurations
        sample_shape = index.shape[: -1 - len(self.batch_shape)]
        return self.log_probs.expand(*sample_shape, *self.log_probs.shape).gather(-1, index)

    def entropy(self) -> Tensor:
        """Return the entropy [*batch], in nats."""
        return entropy(self.log_probs)

    @property
    def mode(self) -> Tensor:
        """The most probable action: [*batch, K], or repeated along the group axis."""
        best = self.configurations[self.log_probs.argmax(-1)]
        if self.group_size is None:
            return best
        return best.unsqueeze(len(self.batch_shape)).expand(*self.batch_shape, *self.event_shape)

    deterministic_sample = mode

    @property
    def mean(self) -> Tensor:
        """There is none; torch would give NaN for choices. Raises InputError, always."""
        raise InputError(
            "ExplorationType.MEAN: a choice among configurations has no mean; set "
            "ExplorationType.DETERMINISTIC, the most probable one, or RANDOM"
        )


class KnobCategoricals(CompositeDistribution):
    """A categorical over configurations with each of K knobs under its own key.

    They are drawn one after the other, each given the knobs before it, so that their product is
    exactly the masked distribution over configurations: no combination is drawn that does not exist
    or was not profiled. The log-prob of a knob, and its entropy, are those of this conditional; the
    sums are the joint ones. Where every combination is possible and knobs are independent, these
    are the plain categoricals of the heads.

    Args:
        log_probs: [*, C], as in `ConfigurationCategorical`.
        names: of the K knobs, the keys of a sample, int64 [*, (G)] each.
        joint: the other arguments of `ConfigurationCategorical`.

    Attributes:
        joint: the distribution over configurations; log-probs of all of them are `log_probs`.
        dists: by name the marginal `Categorical` [*, (G)] of each knob.
    """

    def __init__(
        self, log_probs: Tensor, names: Sequence[str], group_size: int | None = None, **joint: Any
    ) -> None:
        self.names = names
        self.joint = ConfigurationCategorical(log_probs, group_size=group_size, **joint)
        self.log_probs = self.joint.log_probs
        self.group = group_size is not None
        self._batch_shape = self.joint.batch_shape + self.joint.event_shape[:-1]

    @cached_property
    def dists(self) -> dict[str, Categorical]:
        marginals = {}
        for name, column in zip(self.names, self.joint.configurations.unbind(1), strict=True):
            same = column == torch.arange(int(column.max()) + 1, device=column.device).unsqueeze(1)
            # [*, 1, C] with [values, C] → [*, values]
            logits = self._log_mass(self.log_probs.unsqueeze(-2), same)
            marginals[name] = Categorical(logits=self._for_each_draw(logits), validate_args=False)
        return marginals

    def sample(self, shape: Sequence[int] = ()) -> TensorDictBase:
        return self._named(self.joint.sample(shape))

    rsample = sample

    @property
    def mode(self) -> TensorDictBase:
        """The most probable combination, which need not consist of the most probable values."""
        return self._named(self.joint.mode)

    deterministic_sample = mode

    @property
    def mean(self) -> TensorDictBase:
        """There is none. Raises InputError, always."""
        return self._named(self.joint.mean)

    def log_prob(self, sample: TensorDictBase) -> Any:
        """Return log-probs of a sample, by knob; under `composite_lp_aggregate` their sum."""
        if composite_lp_aggregate():
            return self.joint.log_prob(self._action(sample))
        return self.log_prob_composite(sample)

    def log_prob_composite(
        self, sample: TensorDictBase, *, include_sum: bool | None = None
    ) -> TensorDictBase:
        log_probs = self.log_probs.unsqueeze(-2) if self.group else self.log_probs
        by_knob = self._conditionals(log_probs, self._action(sample))
        return self._each("log_prob", by_knob, include_sum)

    def entropy(self, samples_mc: int = 1, **options: Any) -> Any:
        """Return entropies in nats, by knob.

        Under `composite_lp_aggregate` it is their sum [*], without an axis G.
        """
        if composite_lp_aggregate():
            return self.joint.entropy()
        return self.entropy_composite(samples_mc, **options)

    def entropy_composite(
        self, samples_mc: int = 1, *, include_sum: bool | None = None
    ) -> TensorDictBase:
        # every configuration as a draw: [*, C, K]
        by_knob = self._conditionals(self.log_probs.unsqueeze(-2), self.joint.configurations)
        mean = -(self.log_probs.exp().unsqueeze(-1) * by_knob).sum(-2)
        return self._each("entropy", self._for_each_draw(mean), include_sum)

    def _for_each_draw(self, values: Tensor) -> Tensor:
        """Repeat for each draw of a group: [*, n] → [*, (G), n]."""
        if self.group:
            return values.unsqueeze(-2).expand(*self._batch_shape, -1)
        return values

    def _conditionals(self, log_probs: Tensor, action: Tensor) -> Tensor:
        """Return ln p(knob | the knobs before it), [*, K], for actions [*, K], log-probs [*, C]."""
        configurations = self.joint.configurations
        # ln p of the first 0, 1 … K knobs; differences are the conditionals
        masses = [log_probs.new_zeros(())]
        for count in range(1, len(self.names) + 1):
            same = (configurations[:, :count] == action[..., None, :count]).all(-1)
            masses.append(self._log_mass(log_probs, same))
        return torch.stack(torch.broadcast_tensors(*masses), -1).diff(dim=-1)

    @staticmethod
    def _log_mass(log_probs: Tensor, same: Tensor) -> Tensor:
        """Return ln of the probability of the configurations marked in `same`, bool [*, C] → [*].

        It is always finite, so that impossible configurations have no gradient.
        """
        least = torch.finfo(log_probs.dtype).min
        return log_probs.clamp_min(least).masked_fill(~same, least).logsumexp(-1)

    def _action(self, sample: TensorDictBase) -> Tensor:
        return torch.stack([sample.get(name) for name in self.names], -1)

    def _named(self, action: Tensor) -> TensorDictBase:
        return TensorDict(dict(zip(self.names, action.unbind(-1), strict=True)), action.shape[:-1])

    def _each(self, suffix: str, values: Tensor, include_sum: bool | None) -> TensorDictBase:
        out = TensorDict(batch_size=values.shape[:-1])
        for name, value in zip(self.names, values.unbind(-1), strict=True):
            out[f"{name}_{suffix}"] = value
        if composite_lp_aggregate() if include_sum is None else include_sum:
            out[f"action_{suffix}"] = values.sum(-1)
        return out


def actions_by_name(
    knobs: Sequence[Knob], configurations: Tensor, log_probs: Tensor, deterministic: bool
) -> dict[str, Any]:
    """Draw configurations and return their knob values by name, see `Controller.sample_actions`."""
    count = len(configurations)
    if log_probs.shape[-1:] != (count,):
        raise InputError(
            f"sample_actions: log_probs are {[*log_probs.shape]}; must be what the controller "
            f"returns, [*, {count}]"
        )
    draws = ConfigurationCategorical(log_probs.detach(), configurations, normalised=True)
    action = draws.mode if deterministic else draws.sample()
    # value indices [*, K] → the values of each knob
    actions = {}
    for knob, column in zip(knobs, action.cpu().unbind(-1), strict=True):
        # numbers beside text stay numbers
        mixed = len({isinstance(value, str) for value in knob.values}) > 1
        values = np.array(knob.values, dtype=object if mixed else None)
        actions[knob.name] = values[column.numpy()]
    return actions
