"""GRPO as a TorchRL loss module.

It is sampled over a group of draws, or exact over every configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.losses.actor_loss import GroupLoss, Keys, configuration_log_probs, is_zero
from knobwise.losses.functional import (
    AdvantageFunction,
    advantage_diagnostics,
    clipped_surrogate,
    even_weight,
    expectation,
    expected_k3,
    group_advantage,
    known_advantage,
    ratio_diagnostics,
    weight_of_best,
)


class _Group(NamedTuple):
    """A batch of groups: log π, log π_old, log π_ref and rewards, [P, J] each."""

    distribution: Any
    log_prob: Tensor
    old: Tensor
    reference: Tensor | None
    reward: Tensor
    weight: Tensor | None
    """[P, J], see `losses.functional`; None for 1/J each."""


class GRPOLoss(GroupLoss):
    """Minimise the loss of GRPO, group relative policy optimisation, over a group axis.

    Shao et al. 2024, "DeepSeekMath", equation 3:

    −E_j[min(ρ_j A_j, clip(ρ_j, 1 − ε, 1 + ε) A_j)] + β·E_j[k3_j] − η·H, with the advantages A taken
    inside each group. Under `sampled` the expectation is over the G draws of a context. Under
    `exact` it is over all its C configurations, weighted by the behaviour policy: the same
    objective without sampling noise, possible because a profile knows the reward of every
    configuration.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with
            `log_prob(action)` [P, G] for actions [P, G, K], `entropy()` [P], and, for `exact`,
            `log_probs` [P, C] (−inf where masked); or a `CompositeDistribution` of draws [P, G]
            under several keys.
        objective: `sampled` or `exact`.
        clip_epsilon: ε.
        entropy_coeff: η.
        kl_to_ref_coeff: β; may be changed between steps.
        reward_spread: rewards are divided by it, so that β, η, the floor and `advantage_clip` mean
            the same in every unit of reward; see `losses.functional.reward_spread`. None leaves
            rewards as they are. It may be changed between steps.
        std_floor, std_eps: of z-scores, in units of reward, see `group_advantage`. Without a floor
            it is `STD_FLOOR` times the spread, that of the batch if `reward_spread` is None.
        advantage: one of `ADVANTAGES`, a function of your own, or its `module:name`; see
            `group_advantage`.
        advantage_clip: advantages are cut to ± this; None for no cut.
        masked: under `sampled`, groups are of different sizes: `group_mask` tells which draws there
            are.
        top: learn only from this many of a group, those with the highest rewards; None for all.
            Advantages are still taken over the whole group. It may be changed between steps, for a
            curriculum.
        reduction, functional: see `ActorLoss`.

    Outputs: `loss_objective`, `loss_entropy`, `loss_kl_to_ref` (under `torch.compile` and vmap NaN
    when β > 0 and the reference's log-probs are not there), whose sum is minimised; and as
    diagnostics, detached, `entropy`, `kl_to_ref`, `kl_approx` (to the behaviour policy),
    `clip_fraction` (where |ρ − 1| > ε, as in TorchRL), `cut_fraction` (where the clip stops the
    gradient), `ESS` (share), `ratio_mean`, `zero_advantage_fraction` (groups that teach nothing),
    `advantage_mean` and `advantage_std` (over all groups of the batch, whole).

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
            reward_per_configuration: float [P, C], for `exact`; anything where not profiled.
            behaviour_log_probs: float [P, C], for `exact`: the behaviour policy's, −inf where
                masked.
            reference_log_probs: float [P, C], for `exact`; may be missing when β = 0.
        """

        action: Keys = "action"
        configuration: NestedKey = "configuration"
        reward: NestedKey = ("next", "reward")
        group_mask: NestedKey = "group_mask"
        sample_log_prob: Keys = "action_log_prob"
        reference_log_prob: Keys = "reference_log_prob"
        reward_per_configuration: NestedKey = "reward_per_configuration"
        behaviour_log_probs: NestedKey = "behaviour_log_probs"
        reference_log_probs: NestedKey = "reference_log_probs"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
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
    clip_epsilon: Tensor
    entropy_coeff: Tensor
    kl_to_ref_coeff: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        objective: str = "sampled",
        clip_epsilon: float = 0.2,
        entropy_coeff: float = 0.0,
        kl_to_ref_coeff: float = 0.0,
        advantage: str | AdvantageFunction = "zscore",
        advantage_clip: float | None = 5.0,
        reward_spread: float | None = None,
        std_floor: float | None = None,
        std_eps: float = 0.0,
        masked: bool = False,
        top: int | None = None,
        reduction: str | None = None,
        functional: bool = True,
    ) -> None:
        super().__init__(actor_network, reduction=reduction, functional=functional)
        if objective not in ("sampled", "exact"):
            raise ValueError(f"objective {objective!r}: must be sampled or exact")
        self.objective = objective
        self.advantage = known_advantage(advantage)
        self.masked = masked
        self.top = top
        self.advantage_clip = advantage_clip
        self.reward_spread = reward_spread
        self.std_floor = std_floor
        self.std_eps = std_eps
        self.register_buffer("clip_epsilon", torch.tensor(float(clip_epsilon)))
        self.register_buffer("entropy_coeff", torch.tensor(float(entropy_coeff)))
        self.register_buffer("kl_to_ref_coeff", torch.tensor(float(kl_to_ref_coeff)))
        self._check_settings()
        self._forward_value_estimator_keys()

    def _loss_keys(self) -> list[Keys]:
        keys = self.tensor_keys
        if self.objective == "exact":
            return [
                keys.reward_per_configuration,
                keys.behaviour_log_probs,
                keys.reference_log_probs,
            ]
        # the mask says which draws there are, where groups differ in size
        masks = [keys.group_mask] if self.masked else []
        return [keys.action, keys.reward, *masks, keys.sample_log_prob, keys.reference_log_prob]

    def _sampled_group(self, tensordict: TensorDictBase) -> _Group:
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
        return _Group(dist, log_prob, old, reference, reward, weight)

    def _exact_group(self, tensordict: TensorDictBase, finite: bool) -> _Group:
        """Return the groups of all configurations, J = C.

        What is masked has weight 0. Finite numbers in its place keep 0 · ∞ out of values and
        gradients; log π and log π_ref need them only if `finite`.
        """
        keys = self.tensor_keys
        dist = self._distribution(tensordict)
        reward = self._required(tensordict, keys.reward_per_configuration, "all rewards")
        old = self._required(tensordict, keys.behaviour_log_probs, "all old log-probs")
        log_prob = configuration_log_probs(dist)
        reference = tensordict.get(keys.reference_log_probs, None)
        # the behaviour policy never chooses what is masked
        impossible = old == -torch.inf
        weight = old.exp().detach()
        if finite:
            log_prob = log_prob.masked_fill(impossible, 0.0)
            if reference is not None:
                reference = reference.masked_fill(impossible, torch.finfo(old.dtype).min)
        old = old.masked_fill(impossible, 0.0)
        reward = reward.masked_fill(impossible, 0.0)
        return _Group(dist, log_prob, old, reference, reward, weight)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of contexts, [P] with the keys above, each with its whole group.

        Raises:
            InputError: a key is missing, or what is under it is not finite or makes the loss so.
        """
        penalised = not is_zero(self.kl_to_ref_coeff)
        if self.objective == "sampled":
            group = self._sampled_group(tensordict)
        else:
            # the objective alone can do with log π = −∞
            group = self._exact_group(tensordict, finite=penalised or self.diagnostics)
        # a function of the user's is not to blame for rewards that are not finite
        if callable(self.advantage):
            self._check(tensordict, group, [])
        # PPO's objective with the advantages of each group
        advantage = group_advantage(
            group.reward,
            self.advantage,
            weight=group.weight,
            clip=self.advantage_clip,
            unit=self.reward_spread,
            std_floor=self.std_floor,
            std_eps=self.std_eps,
        )
        surrogate, cut = clipped_surrogate(
            group.log_prob, group.old.detach(), advantage, self.clip_epsilon
        )
        # a curriculum learns from the best of a group alone
        learned = group.weight
        if self.top is not None:
            learned = weight_of_best(group.reward, self.top, group.weight)
        # where all draws count alike, one mean over draws and contexts is faster than two
        if learned is not None or self.reduction != "mean":
            surrogate = expectation(surrogate, learned)
        out = {"loss_objective": -self._reduce_loss(surrogate, tensordict)}
        out["loss_entropy"] = out["loss_kl_to_ref"] = torch.zeros_like(out["loss_objective"])
        # terms of weight 0 are not computed
        if not is_zero(self.entropy_coeff):
            entropy = self._entropy(group.distribution)
            out["loss_entropy"] = self._reduce_loss(-self.entropy_coeff * entropy, tensordict)
        # the KL to the reference policy; without one the policy itself, or NaN under a penalty
        current = group.log_prob.detach()
        if group.reference is None:
            self._check_reference(tensordict)
            reference = torch.where(self.kl_to_ref_coeff == 0, current, torch.nan)
        else:
            reference = group.reference.detach()
        if penalised:
            # β may be 0 where that is not known; no ∞ of a far reference may meet the 0
            kl = self._kl(group, torch.where(self.kl_to_ref_coeff == 0, current, reference))
            out["loss_kl_to_ref"] = self._reduce_loss(self.kl_to_ref_coeff * kl, tensordict)
        self._check(tensordict, group, [*out.values()])
        if self.diagnostics:
            used = advantage if learned is None else advantage * (learned > 0)
            with torch.no_grad():
                log_ratio = group.log_prob - group.old
                out["entropy"] = self._entropy(group.distribution).mean()
                out["kl_to_ref"] = self._kl(group, reference).mean()
                out |= ratio_diagnostics(log_ratio, group.weight, cut, self.clip_epsilon)
                out |= advantage_diagnostics(advantage, group.weight, used)
        return TensorDict(out, batch_size=[])

    def _kl(self, group: _Group, reference: Tensor) -> Tensor:
        """Compute the KL to a reference policy of each context, [P]."""
        # the weights of `exact` are the behaviour policy's probabilities
        behaviour = group.old.detach() if self.objective == "exact" else None
        return expected_k3(group.log_prob, reference, behaviour, group.weight)
