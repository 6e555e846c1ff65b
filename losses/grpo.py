"""GRPO as a TorchRL loss module: sampled over a group of draws, or exact over every configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from tensordict.utils import NestedKey
from torch import Tensor

from knobwise.losses.actor import ActorLoss
from knobwise.losses.advantage import ADVANTAGES, group_advantage
from knobwise.losses.functional import clipped_surrogate, effective_sample_size, expectation, k3


class GRPOLoss(ActorLoss):
    """Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath", equation 3) with a group axis.

    −E_j[min(ρ_j A_j, clip(ρ_j, 1 − ε, 1 + ε) A_j)] + β·E_j[k3_j] − η·H, with the advantages A taken inside each group.
    Under `sampled` the expectation is over the G draws of a context. Under `exact` it is over all its C configurations,
    weighted by the behaviour policy: the same objective without sampling noise, possible because a profile knows the
    reward of every configuration.

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with `log_prob(action)` [P, G] for
            actions [P, G, K], `entropy()` [P], and, for `exact`, `log_probs` [P, C] (−inf where masked).
        objective: `sampled` or `exact`.
        clip_epsilon: ε.
        entropy_coeff: η.
        kl_to_ref_coeff: β; may be changed between steps, also by `adapt_kl`.
        advantage: `zscore`, `centred` or `rank`, see `group_advantage`.
        advantage_std_floor: smallest standard deviation divided by.
        advantage_clip: advantages are cut to ± this.
        reduction: `mean`, `sum` or `none` over contexts.
        functional: keep the parameters apart from the module, as TorchRL does (needed under vmap); off is faster.

    Outputs: `loss_objective`, `loss_entropy`, `loss_kl_to_ref` (NaN when β > 0 and the reference's log-probs are not
    there), whose sum is minimised; and for the eye, detached, `entropy`, `kl_to_ref`, `kl_approx` (to the behaviour
    policy), `clip_fraction`, `ESS` (share), `ratio_mean`, `zero_advantage_fraction` (groups that teach nothing).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from knobwise.agents.policy import ConfigurationCategorical
        >>> from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
        >>> net = TensorDictModule(torch.nn.Linear(3, 4), in_keys=["observation"], out_keys=["log_probs"])
        >>> draw = ProbabilisticTensorDictModule(
        ...     in_keys=["log_probs"], out_keys=["action"], distribution_class=ConfigurationCategorical,
        ...     distribution_kwargs={"configurations": torch.cartesian_prod(torch.arange(2), torch.arange(2)),
        ...                          "group_size": 5})
        >>> loss = GRPOLoss(ProbabilisticTensorDictSequential(net, draw))
        >>> data = TensorDict({"observation": torch.randn(6, 3), "action": torch.randint(2, (6, 5, 2)),
        ...     "action_log_prob": torch.full((6, 5), -1.4), "next": {"reward": torch.rand(6, 5)}}, [6])
        >>> loss(data)["loss_objective"].shape
        torch.Size([])
    """

    @dataclass
    class _AcceptedKeys:
        """Where things stand in the tensordict.

        Attributes:
            action: int64 [P, G, K].
            reward: float [P, G], of each draw.
            sample_log_prob: float [P, G], of the draws under the behaviour policy.
            reference_log_prob: float [P, G], of the draws under the reference policy; may be missing when β = 0.
            reward_per_configuration: float [P, C], for `exact`; anything where not profiled.
            behaviour_log_probs: float [P, C], for `exact`: the behaviour policy's, −inf where masked.
            reference_log_probs: float [P, C], for `exact`; may be missing when β = 0.
        """

        action: NestedKey = "action"
        reward: NestedKey = ("next", "reward")
        sample_log_prob: NestedKey = "action_log_prob"
        reference_log_prob: NestedKey = "reference_log_prob"
        reward_per_configuration: NestedKey = "reward_per_configuration"
        behaviour_log_probs: NestedKey = "behaviour_log_probs"
        reference_log_probs: NestedKey = "reference_log_probs"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
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
        advantage: str = "zscore",
        advantage_std_floor: float = 0.1,
        advantage_clip: float = 5.0,
        reduction: str = "mean",
        functional: bool = True,
    ) -> None:
        super().__init__(actor_network, reduction=reduction, functional=functional)
        if objective not in ("sampled", "exact"):
            raise ValueError(f"objective {objective!r}: must be sampled or exact")
        if advantage not in ADVANTAGES:
            raise ValueError(f"advantage {advantage!r}: must be one of {', '.join(ADVANTAGES)}")
        self.objective, self.advantage = objective, advantage
        self.advantage_std_floor, self.advantage_clip = advantage_std_floor, advantage_clip
        for name, value in (
            ("clip_epsilon", clip_epsilon),
            ("entropy_coeff", entropy_coeff),
            ("kl_to_ref_coeff", kl_to_ref_coeff),
        ):
            self.register_buffer(name, torch.tensor(float(value)))

    def _own_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        sampled = self.objective == "sampled"
        own = [keys.action, keys.reward, keys.sample_log_prob]
        own = own if sampled else [keys.reward_per_configuration, keys.behaviour_log_probs]
        return [*own, keys.reference_log_prob if sampled else keys.reference_log_probs]

    @property
    def out_keys(self) -> list[str]:
        if self._out_keys is None:
            self._out_keys = [
                *("loss_objective", "loss_entropy", "loss_kl_to_ref", "entropy", "kl_to_ref", "kl_approx"),
                *("clip_fraction", "ESS", "ratio_mean", "zero_advantage_fraction"),
            ]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[str]) -> None:
        self._out_keys = values

    _out_keys: list[str] | None = None

    def _group(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
        """log π, log π_old, log π_ref, rewards, all [P, J], weights [P, J] or None, and the entropy [P]."""
        keys = self.tensor_keys
        dist = self._distribution(tensordict)
        if self.objective == "sampled":
            log_prob = dist.log_prob(tensordict.get(keys.action))
            old = tensordict.get(keys.sample_log_prob)
            reference = tensordict.get(keys.reference_log_prob, None)
            return log_prob, old, reference, tensordict.get(keys.reward), None, dist.entropy()
        old = tensordict.get(keys.behaviour_log_probs).detach()
        reference = tensordict.get(keys.reference_log_probs, None)
        # what is masked has weight 0; a finite number in its place keeps 0 · inf out of value and gradient
        masked = old == -torch.inf
        log_prob, old_filled = dist.log_probs.masked_fill(masked, 0.0), old.masked_fill(masked, 0.0)
        reference = None if reference is None else reference.masked_fill(masked, 0.0)
        reward = tensordict.get(keys.reward_per_configuration).masked_fill(masked, 0.0)
        return log_prob, old_filled, reference, reward, old.exp(), dist.entropy()

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of contexts, each with its whole group.

        Args:
            tensordict: batch [P] with the keys above.

        Returns:
            the outputs named in the class docstring.
        """
        log_prob, old, reference, reward, weight, entropy = self._group(tensordict)
        old, reward = old.detach(), reward.detach()
        advantage = group_advantage(
            reward, self.advantage, weight=weight, std_floor=self.advantage_std_floor, clip=self.advantage_clip
        )
        surrogate, cut = clipped_surrogate(log_prob, old, advantage, self.clip_epsilon)
        penalised = self.kl_to_ref_coeff > 0
        if reference is None:
            kl = torch.where(penalised, torch.nan, 0.0).to(log_prob.dtype).expand_as(log_prob)
        else:
            # far from the reference k3 overflows; where it costs nothing that must not reach the gradient as 0 · inf
            kl = k3(torch.where(penalised, log_prob, log_prob.detach()), reference.detach())
        losses = {
            "loss_objective": -expectation(surrogate, weight),
            "loss_entropy": -self.entropy_coeff * entropy,
            "loss_kl_to_ref": torch.where(penalised, self.kl_to_ref_coeff * expectation(kl, weight), 0.0),
        }
        out = {name: self._reduce_loss(loss, tensordict) for name, loss in losses.items()}
        with torch.no_grad():
            log_ratio = log_prob - old
            taught = advantage if weight is None else advantage * (weight > 0)
            out |= {
                "entropy": entropy.mean(),
                "kl_to_ref": expectation(kl, weight).mean(),
                "kl_approx": -expectation(log_ratio, weight).mean(),
                "clip_fraction": expectation(cut.to(log_prob.dtype), weight).mean(),
                "ESS": effective_sample_size(log_ratio, weight),
                "ratio_mean": expectation(log_ratio.exp(), weight).mean(),
                "zero_advantage_fraction": (taught.abs() < 1e-6).all(-1).to(log_prob.dtype).mean(),
            }
        out = {name: value if name.startswith("loss_") else value.detach() for name, value in out.items()}
        return TensorDict(out, batch_size=[])

    def adapt_kl(
        self, kl: float, low: float, high: float, factor: float = 1.5, least: float = 1e-3, most: float = 10.0
    ) -> float:
        """Steer β so that the KL to the reference stays in a band: above `high` × factor, below `low` ÷ factor.

        Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4, within [least, most].

        Args:
            kl: what was seen, `kl_to_ref`, in nats.
            low: lower end of the band.
            high: upper end of the band.
            factor: by how much β changes.
            least: smallest β.
            most: largest β.

        Returns: the new β.
        """
        change = factor if kl > high else 1 / factor if kl < low else 1.0
        self.kl_to_ref_coeff.mul_(change).clamp_(least, most)
        return float(self.kl_to_ref_coeff)
