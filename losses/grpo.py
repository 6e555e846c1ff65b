"""GRPO as a TorchRL loss module, over a group of draws; `losses.exact_grpo` is over every
configuration."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torch.distributions import Distribution

from knobwise.common.checks import at_least, positive
from knobwise.losses.actor_loss import ActorLoss
from knobwise.losses.functional import (
    AdvantageFunction,
    Objective,
    advantage_diagnostics,
    even_weight,
    expected_k3,
    group_advantage,
    grpo_objective,
    known_advantage,
    ratio_diagnostics,
    weight_of_best,
)
from knobwise.losses.guards import (
    Keys,
    Read,
    harmless_reference,
    is_finite,
    is_positive,
    is_zero,
)


class Group(NamedTuple):
    """A batch of groups: log π, log π_old, log π_ref and rewards, [P, J] each."""

    distribution: Distribution
    log_prob: Tensor
    old: Tensor
    reference: Tensor | None
    reward: Tensor
    weight: Tensor | None
    """[P, J], see `losses.functional`; None for 1/J each."""


class GroupLoss(ActorLoss):
    """GRPO, group relative policy optimisation, over the groups that a subclass reads.

    Shao et al. 2024, "DeepSeekMath", equation 3:

    −E_j[min(ρ_j A_j, clip(ρ_j, 1 − ε, 1 + ε) A_j)] + β·E_j[k3_j] − η·H, with the advantages A taken
    inside each group.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution.
        clip_epsilon: ε, or that of the lower and that of the upper end.
        entropy_coeff: η.
        kl_to_ref_coeff: β; may be changed between steps. `LossConfig` knows whether there was a
            teacher, and so has another default.
        advantage: one of `ADVANTAGES`, a function of your own, or its `module:name`; see
            `group_advantage`.
        advantage_clip: advantages are cut to ± this. None: z-scores to ± 5, others not at all.
        advantage_std_floor, advantage_std_eps: of z-scores, in units of reward, see
            `group_advantage`. Without a floor it is `STD_FLOOR` times the spread, that of the batch
            if `reward_spread` is None.
        reward_spread: rewards are divided by it, so that β, η, the floor and `advantage_clip` mean
            the same in every unit of reward; see `losses.functional.reward_spread`. None leaves
            rewards as they are, where a stage of training measures it. It may be changed between
            steps.
        top: learn only from this many of a group, those with the highest rewards; None for all.
            Advantages are still taken over the whole group. It may be changed between steps, for a
            curriculum.
        reduction, functional: see `ActorLoss`.

    Outputs: `loss_objective`, `loss_entropy`, `loss_kl_to_ref`, whose sum is minimised; and as
    diagnostics, detached, `entropy`, `kl_to_ref` (the mean k3 of the group, which estimates the KL
    only if the policy drew it), `kl_approx` (to the behaviour policy),
    `clip_fraction` (where ρ is outside the clip, as in TorchRL), `cut_fraction` (where the clip
    stops the gradient), `ESS` (share), `ratio_mean`, `zero_advantage_fraction` (groups that teach
    nothing), `advantage_mean` and `advantage_std` (over all groups of the batch, whole).
    """

    out_keys = [
        "loss_objective",
        "loss_entropy",
        "loss_kl_to_ref",
        "entropy",
        "kl_to_ref",
        "kl_approx",
        "clip_fraction",
        "cut_fraction",
        "ESS",
        "ratio_mean",
        "zero_advantage_fraction",
        "advantage_mean",
        "advantage_std",
    ]
    _schedulable_buffers = frozenset({"clip_epsilon", "entropy_coeff", "kl_to_ref_coeff"})
    exact = False
    """True if the weights of a group are the probabilities of the behaviour policy."""
    clip_epsilon: Tensor
    entropy_coeff: Tensor
    kl_to_ref_coeff: Tensor
    at_least_0 = (
        "clip_epsilon",
        "entropy_coeff",
        "kl_to_ref_coeff",
        "advantage_std_floor",
        "advantage_std_eps",
    )
    above_0 = ("reward_spread", "advantage_clip", "top")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.0,
        kl_to_ref_coeff: float = 0.0,
        advantage: str | AdvantageFunction = "centred",
        advantage_clip: float | None = None,
        advantage_std_floor: float | None = None,
        advantage_std_eps: float = 0.0,
        reward_spread: float | None = None,
        top: int | None = None,
        reduction: str | None = None,
        functional: bool = True,
    ) -> None:
        super().__init__(actor_network, reduction=reduction, functional=functional)
        self.advantage = known_advantage(advantage)
        self.top = top
        self.advantage_clip = advantage_clip
        self.reward_spread = reward_spread
        self.advantage_std_floor = advantage_std_floor
        self.advantage_std_eps = advantage_std_eps
        self._began_with_kl = kl_to_ref_coeff > 0
        self._register(
            clip_epsilon=clip_epsilon, entropy_coeff=entropy_coeff, kl_to_ref_coeff=kl_to_ref_coeff
        )
        self._check_settings()

    @abstractmethod
    def _group(self, tensordict: TensorDictBase) -> Group:
        """Return the groups of contexts, with finite numbers in the place of what is masked."""

    @property
    @abstractmethod
    def _keys(self) -> tuple[Keys, Keys, Keys]:
        """The keys of rewards, old log-probs and log-probs of the reference."""

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of contexts, [P] with the keys above, each with its whole group.

        Raises:
            InputError: a key is missing, or what is under it is not finite or makes the loss so.
        """
        group = self._group(tensordict)
        advantage = self._advantage(tensordict, group)
        learned = self._learned_weight(group)
        # −E_j[min(ρ_j A_j, clip(ρ_j) A_j)] + β·E_j[k3_j] − η·H; terms of weight 0 are left out
        objective = grpo_objective(
            group.log_prob,
            group.old.detach(),
            advantage,
            self._reference(tensordict, group),
            group.weight,
            self.clip_epsilon,
            exact=self.exact,
            learned=learned,
        )
        out = {"loss_objective": -self._reduce_loss(objective.surrogate, tensordict)}
        out["loss_entropy"] = out["loss_kl_to_ref"] = torch.zeros_like(out["loss_objective"])
        if objective.kl is not None:
            kl = self.kl_to_ref_coeff * objective.kl
            out["loss_kl_to_ref"] = self._reduce_loss(kl, tensordict)
        if not is_zero(self.entropy_coeff):
            entropy = self._entropy(group.distribution, group.reward.ndim - 1)
            out["loss_entropy"] = self._reduce_loss(-self.entropy_coeff * entropy, tensordict)

        self._check(tensordict, group, [*out.values()])
        if self.diagnostics:
            out |= self._diagnosed(group, advantage, learned, objective)
        return TensorDict(out, batch_size=[])

    def _advantage(self, tensordict: TensorDictBase, group: Group) -> Tensor:
        """Return the advantages inside each group, [P, J]."""
        # a function of the user's is not to blame for rewards that are not finite
        if callable(self.advantage):
            self._check(tensordict, group, [])
        return group_advantage(
            group.reward,
            self.advantage,
            weight=group.weight,
            clip=self.advantage_clip,
            unit=self.reward_spread,
            std_floor=self.advantage_std_floor,
            std_eps=self.advantage_std_eps,
        )

    def _learned_weight(self, group: Group) -> Tensor | None:
        """Return the weights in the surrogate, [P, J], as in `Group`: those of the group, or under
        a curriculum those of its best alone."""
        if self.top is None:
            return group.weight
        return weight_of_best(group.reward, self.top, group.weight)

    def _reference(self, tensordict: TensorDictBase, group: Group) -> Tensor | None:
        """Return the log-probs that the KL is taken to, [P, J]; None if β is 0 or no reference was
        given."""
        if group.reference is None:
            self._refuse_without_reference(tensordict)
            return None
        return harmless_reference(group.reference, group.log_prob, self.kl_to_ref_coeff)

    @torch.no_grad()
    def _diagnosed(
        self, group: Group, advantage: Tensor, learned: Tensor | None, objective: Objective
    ) -> dict[str, Tensor]:
        """Return the diagnostics, a single number each."""
        # without a reference the policy is its own, and the KL is 0
        reference = group.log_prob if group.reference is None else group.reference
        behaviour = group.old if self.exact else None
        kl_to_ref = expected_k3(group.log_prob, reference, behaviour, group.weight)
        out = {
            "entropy": self._entropy(group.distribution, group.reward.ndim - 1).mean(),
            "kl_to_ref": kl_to_ref.mean(),
        }
        log_ratio = group.log_prob - group.old
        out |= ratio_diagnostics(log_ratio, group.weight, objective.cut, self.clip_epsilon)
        used = advantage if learned is None else advantage * (learned > 0)
        return out | advantage_diagnostics(advantage, group.weight, used)

    # -- what the loss refuses ---------------------------------------------------------------------

    def _check_settings(self) -> None:
        """Refuse numbers that would teach the wrong thing, or nothing; None is a default.

        Raises:
            InputError: a number is too small or not finite.
        """
        for name in (*self.at_least_0, *self.above_0):
            value = getattr(self, name)
            if value is not None:
                key = f"{type(self).__name__}: {name}"
                for number in torch.as_tensor(value).flatten().tolist():
                    at_least(key, number, 0)
                    if name in self.above_0:
                        positive(key, number)

    def _refuse_without_reference(self, tensordict: TensorDictBase) -> None:
        """Refuse contexts that lack the reference's log-probs where β > 0.

        Under `torch.compile`, where β is not known beforehand, the compiled code refuses them, by a
        RuntimeError; under vmap the β of the beginning counts.
        """
        meaning = "the reference policy's log-probs, which the KL of β > 0 needs"
        if torch.compiler.is_compiling():
            torch._assert_async(self.kl_to_ref_coeff == 0, meaning)
        elif self._began_with_kl or is_positive(self.kl_to_ref_coeff):
            self._required(tensordict, self._keys[2], meaning)

    def _check(self, tensordict: TensorDictBase, group: Group, losses: list[Tensor]) -> None:
        """Refuse a group that has, or makes, a number that is not finite; see `_refuse`."""
        # one look at all numbers, since each waits for the device
        if is_finite(*losses, group.reward, group.old):
            return
        reward_key, old_key, reference_key = self._keys
        read = [Read(reward_key, group.reward)]
        read.append(Read(old_key, group.old, group.log_prob - group.old))
        if group.reference is not None and is_positive(self.kl_to_ref_coeff):
            log_ratio = group.reference - group.log_prob
            read.append(Read(reference_key, group.reference, log_ratio))
        self._refuse(tensordict, read, losses)


class GRPOLoss(GroupLoss):
    """GRPO over the G draws of each context; see `GroupLoss` for formula, settings and outputs.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with
            `log_prob(action)` [P, G] for actions [P, G, K] and `entropy()` [P]; or a
            `CompositeDistribution` of draws [P, G] under several keys.
        masked: groups have different sizes: `group_mask` bool [P, G] marks the valid draws.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from knobwise.agents.controller.actor import ConfigurationCategorical
        >>> from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
        >>> from tensordict.nn import ProbabilisticTensorDictSequential
        >>> net = TensorDictModule(
        ...     torch.nn.Linear(3, 4), in_keys=["observation"], out_keys=["log_probs"]
        ... )
        >>> grid = torch.cartesian_prod(torch.arange(2), torch.arange(2))
        >>> draw = ProbabilisticTensorDictModule(
        ...     in_keys=["log_probs"],
        ...     out_keys=["action"],
        ...     distribution_class=ConfigurationCategorical,
        ...     distribution_kwargs={"configurations": grid, "group_size": 5},
        ... )
        >>> loss = GRPOLoss(ProbabilisticTensorDictSequential(net, draw))
        >>> data = TensorDict(
        ...     {
        ...         "observation": torch.randn(6, 3),
        ...         "action": torch.randint(2, (6, 5, 2)),
        ...         "action_log_prob": torch.full((6, 5), -1.4),
        ...         "next": {"reward": torch.rand(6, 5)},
        ...     },
        ...     [6],
        ... )
        >>> loss(data)["loss_objective"].shape
        torch.Size([])
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            action: int64 [P, G, K], or of a composite a list of keys, [P, G] each.
            configuration: int64 [P, G], which configuration each draw was. Where it exists,
                `action` is not read unless it is a list, and the log-prob is the distribution's
                `log_prob_of_index`.
            reward: float [P, G], of each draw.
            group_mask: bool [P, G], for `masked`: which draws there are. A group of one or of none
                teaches nothing.
            sample_log_prob: float [P, G], of the draws under the behaviour policy; of a list of
                keys the sum. Draws without a group axis, [P] with rewards [P, 1], are groups of
                one, which teach only under `unnormalised`.
            reference_log_prob: float [P, G], of the draws under the reference policy; may be
                missing when β = 0.
        """

        action: Keys = "action"
        configuration: NestedKey = "configuration"
        reward: NestedKey = ("next", "reward")
        group_mask: NestedKey = "group_mask"
        sample_log_prob: Keys = "action_log_prob"
        reference_log_prob: Keys = "reference_log_prob"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        masked: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(actor_network, **settings)
        self.masked = masked
        self._warned = False
        self._forward_value_estimator_keys()

    @property
    def _keys(self) -> tuple[Keys, Keys, Keys]:
        keys = self.tensor_keys
        return keys.reward, keys.sample_log_prob, keys.reference_log_prob

    def _loss_keys(self) -> list[Keys]:
        keys = self.tensor_keys
        # the mask says which draws there are, where groups differ in size
        masks = [keys.group_mask] if self.masked else []
        return [keys.action, keys.reward, *masks, keys.sample_log_prob, keys.reference_log_prob]

    def _group(self, tensordict: TensorDictBase) -> Group:
        """Return the groups of draws, J = G."""
        keys = self.tensor_keys
        dist = self._distribution(tensordict)
        reward = self._required(tensordict, keys.reward, "the rewards of the draws")
        old = self._required(tensordict, keys.sample_log_prob, "the log-probs of the draws")
        # groups of one may lack their axis
        if reward.shape not in (old.shape, (*old.shape, 1)):
            shapes = f"rewards are {tuple(reward.shape)} and log-probs of draws {tuple(old.shape)}"
            raise ValueError(
                f"{shapes}; both must be [contexts, group]: give env and policy the same group_size"
            )
        self._warn_of_single_draws(reward)
        # the index of a configuration spares the search for its knob values
        index = None
        if not isinstance(keys.action, list):
            index = tensordict.get(keys.configuration, None)
        if index is None:
            log_prob = self._log_prob(dist, tensordict)
        else:
            log_prob = dist.log_prob_of_index(index)
        reference = self._summed(tensordict, keys.reference_log_prob)
        if reference is not None:
            reference = reference.view_as(reward)
        log_prob, old = (x.view_as(reward) for x in (log_prob, old))
        weight = None
        if self.masked:
            mask = self._required(tensordict, keys.group_mask, "which draws there are")
            weight = even_weight(mask)
            # finite numbers in the place of what is not there
            log_prob, old, reward = (x.masked_fill(~mask, 0.0) for x in (log_prob, old, reward))
            if reference is not None:
                reference = reference.masked_fill(~mask, 0.0)
        return Group(dist, log_prob, old, reference, reward, weight)

    def _warn_of_single_draws(self, reward: Tensor) -> None:
        """Warn once if every group [P, J] is one draw, which has nothing to be compared with."""
        compares = isinstance(self.advantage, str) and self.advantage != "unnormalised"
        if self._warned or not compares or reward.shape[-1] > 1 or torch.compiler.is_compiling():
            return
        self._warned = True
        warnings.warn(
            f"{type(self).__name__}: every group is one draw, whose {self.advantage} advantage is "
            "0, so nothing is learned; give env and policy a group_size, such as 16, or take "
            "advantage='unnormalised'",
            stacklevel=2,
        )
