"""GRPO as a TorchRL loss module: sampled over a group of draws, or exact over every
configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.losses.actor_loss import ActorLoss, Keys, is_zero
from knobwise.losses.functional import (
    AdvantageFunction,
    clipped_surrogate,
    effective_sample_size,
    even_weight,
    expectation,
    expected_k3,
    group_advantage,
    known_advantage,
    weight_of_best,
)


class GRPOLoss(ActorLoss):
    """Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath", equation 3) with a
    group axis.

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
        advantage: one of `ADVANTAGES`, a function of your own, or its `module:name`; see
            `group_advantage`.
        advantage_std_floor: smallest standard deviation divided by.
        advantage_clip: advantages are cut to ± this.
        masked: under `sampled`, groups are of different sizes: `group_mask` tells which draws there
            are.
        top: how many of a group, those with the highest rewards, are learned from, after the
            advantages were taken over the whole group; None for all. It may be changed between
            steps, for a curriculum.
        reduction, functional: see `ActorLoss`.

    Outputs: `loss_objective`, `loss_entropy`, `loss_kl_to_ref` (NaN when β > 0 and the reference's
    log-probs are not there), whose sum is minimised; and as diagnostics, detached, `entropy`,
    `kl_to_ref`, `kl_approx` (to the behaviour policy), `clip_fraction`, `ESS` (share),
    `ratio_mean`, `zero_advantage_fraction` (groups that teach nothing), `advantage_mean` and
    `advantage_std` (over all groups of the batch, whole).

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
            configuration: int64 [P, G], which configuration each draw was: when it is there,
                `action` is not read unless it is a list, and the distribution is asked for
                `log_prob_of_index`.
            reward: float [P, G], of each draw.
            group_mask: bool [P, G], for `masked`: which draws there are. A group of one or of none
                teaches nothing.
            sample_log_prob: float [P, G], of the draws under the behaviour policy; of a list of
                keys the sum. Draws without a group axis, [P] with rewards [P, 1], are groups of
                one, which teach only under `unnormalised`.
            reference_log_prob: the same under the reference policy; may be missing when β = 0.
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
        *("loss_objective", "loss_entropy", "loss_kl_to_ref", "entropy", "kl_to_ref", "kl_approx"),
        *(
            "clip_fraction",
            "ESS",
            "ratio_mean",
            "zero_advantage_fraction",
            "advantage_mean",
            "advantage_std",
        ),
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
        advantage_std_floor: float = 0.1,
        advantage_clip: float = 5.0,
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
        self.advantage_std_floor = advantage_std_floor
        self.advantage_clip = advantage_clip
        self.register_buffer("clip_epsilon", torch.tensor(float(clip_epsilon)))
        self.register_buffer("entropy_coeff", torch.tensor(float(entropy_coeff)))
        self.register_buffer("kl_to_ref_coeff", torch.tensor(float(kl_to_ref_coeff)))
        self._forward_value_estimator_keys()

    def _loss_keys(self) -> list[Keys]:
        keys = self.tensor_keys
        if self.objective == "exact":
            return [
                keys.reward_per_configuration,
                keys.behaviour_log_probs,
                keys.reference_log_probs,
            ]
        mask = [keys.group_mask] if self.masked else []
        return [keys.action, keys.reward, *mask, keys.sample_log_prob, keys.reference_log_prob]

    def _group(
        self, tensordict: TensorDictBase, finite: bool
    ) -> tuple[Any, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """The distribution, log π, log π_old, log π_ref, rewards, all [P, J], and weights [P, J] or
        None."""
        keys = self.tensor_keys
        dist = self._distribution(tensordict)
        if self.objective == "sampled":
            reward = tensordict.get(keys.reward)
            old = self._summed(tensordict, keys.sample_log_prob)
            if reward.shape not in (
                old.shape,
                (*old.shape, 1),
            ):  # groups of one may lack their axis
                shapes = (
                    f"rewards are {tuple(reward.shape)} and log-probs of draws {tuple(old.shape)}"
                )
                raise ValueError(
                    f"{shapes}; both must be [contexts, group]: give env and policy the same "
                    "group_size"
                )
            if isinstance(keys.action, list):
                index = None
            else:
                index = tensordict.get(keys.configuration, None)
            if index is None:
                log_prob = self._log_prob(dist, tensordict)
            else:
                log_prob = dist.log_prob_of_index(index)
            log_prob = log_prob.view_as(reward)
            old = old.view_as(reward)
            reference = self._summed(tensordict, keys.reference_log_prob)
            if reference is None:
                reference = None
            else:
                reference = reference.view_as(reward)
            if self.masked:
                weight = even_weight(tensordict.get(keys.group_mask))
            else:
                weight = None
            return dist, log_prob, old, reference, reward, weight
        reward = tensordict.get(keys.reward_per_configuration)
        old = tensordict.get(keys.behaviour_log_probs)
        log_prob = self._log_probs(dist)
        reference = tensordict.get(keys.reference_log_probs, None)
        # what is masked has weight 0; finite numbers in its place keep 0 · ∞ out of values and
        # gradients
        impossible = old == -torch.inf
        weight = old.exp().detach()
        if finite:  # the objective alone can do with log π = −∞
            log_prob = log_prob.masked_fill(impossible, 0.0)
            if reference is None:
                reference = None
            else:
                reference = reference.masked_fill(impossible, torch.finfo(old.dtype).min)
        old = old.masked_fill(impossible, 0.0)
        reward = reward.masked_fill(impossible, 0.0)
        return dist, log_prob, old, reference, reward, weight

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of contexts, [P] with the keys above, each with its whole group."""
        penalised = not is_zero(self.kl_to_ref_coeff)
        dist, log_prob, old, reference, reward, weight = self._group(
            tensordict, finite=penalised or self.diagnostics
        )
        floor = self.advantage_std_floor
        most = self.advantage_clip
        advantage = group_advantage(
            reward, self.advantage, weight=weight, std_floor=floor, clip=most
        )
        surrogate, cut = clipped_surrogate(log_prob, old.detach(), advantage, self.clip_epsilon)
        if self.top is None:
            learned = weight
        else:
            learned = weight_of_best(reward, self.top, weight)
        out = {"loss_objective": self._reduce_loss(-expectation(surrogate, learned), tensordict)}
        out["loss_entropy"] = out["loss_kl_to_ref"] = torch.zeros_like(out["loss_objective"])
        if not is_zero(self.entropy_coeff):
            out["loss_entropy"] = self._reduce_loss(
                -self.entropy_coeff * self._entropy(dist), tensordict
            )
        if self.objective == "exact":
            behaviour = old.detach()
        else:
            behaviour = None
        policy = log_prob.detach()
        if reference is None:
            if penalised:
                reference = torch.where(self.kl_to_ref_coeff == 0, policy, torch.nan)
            else:
                reference = policy
        if (
            penalised
        ):  # also where it is not known whether β is 0: then no ∞ of a far reference may meet the 0
            towards = torch.where(self.kl_to_ref_coeff == 0, policy, reference.detach())
            kl = expected_k3(log_prob, towards, behaviour, weight)
            out["loss_kl_to_ref"] = self._reduce_loss(self.kl_to_ref_coeff * kl, tensordict)
        if self.diagnostics:
            with torch.no_grad():
                log_ratio = log_prob - old
                if learned is None:
                    used = advantage
                else:
                    used = advantage * (learned > 0)
                mean, square = (
                    expectation(power, weight).mean() for power in (advantage, advantage.square())
                )
                out |= {
                    "entropy": self._entropy(dist).mean(),
                    "kl_to_ref": expected_k3(log_prob, reference, behaviour, weight).mean(),
                    "kl_approx": -expectation(log_ratio, weight).mean(),
                    "clip_fraction": expectation(cut.to(log_prob.dtype), weight).mean(),
                    "ESS": effective_sample_size(log_ratio, weight),
                    "ratio_mean": expectation(log_ratio.exp(), weight).mean(),
                    "zero_advantage_fraction": (used.abs() < 1e-6)
                    .all(-1)
                    .to(log_prob.dtype)
                    .mean(),
                    "advantage_mean": mean,
                    "advantage_std": (square - mean.square()).clamp_min(0).sqrt(),
                }
        return TensorDict(out, batch_size=[])
