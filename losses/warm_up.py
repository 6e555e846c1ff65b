"""The losses of the warm-up before GRPO.

RCE imitates the softmax of the rewards; with an infinite temperature it imitates all alternatives
alike. Regression teaches the measured outcomes to a policy that predicts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn import functional
from torchrl.objectives import LossModule

from knobwise.losses.actor_loss import ActorLoss, Keys
from knobwise.losses.functional import gaussian_nll, reward_weighted_cross_entropy


class RCELoss(ActorLoss):
    """Minimise RCE: the cross-entropy of a policy to softmax(reward/τ) over the configurations.

    All profiled configurations of a context take part. With `recorded` the recorded actions of its
    group do instead, for contexts with more alternatives than can be listed:
    −Σ_b softmax(reward/τ)_b ln π(b).

    Args:
        actor_network: a module whose `get_dist(tensordict)` gives a distribution with `log_probs`
            [P, C], or with `recorded` with `log_prob(action)` [P, G]; or a `CompositeDistribution`,
            see `ActorLoss`.
        recorded: imitate `action` instead of every configuration.
        temperature: τ, in units of reward; may be changed between steps (it falls during the
            warm-up); infinite for a plain mean, supervised fine-tuning.
        reduction: see `ActorLoss`.

    Outputs: `loss_rce`; and as a diagnostic the `entropy` of the policy.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            reward_per_configuration: float [P, C], NaN where not profiled.
            action: with `recorded`, the actions of the group, [P, G, …], or for a composite a list
                of keys.
            reward: with `recorded`, float [P, G].
            group_mask: with `recorded`, bool [P, G], which of the actions exist.
        """

        reward_per_configuration: NestedKey = "reward_per_configuration"
        action: Keys = "action"
        reward: NestedKey = ("next", "reward")
        group_mask: NestedKey = "group_mask"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss_rce", "entropy"]
    _schedulable_buffers = frozenset({"temperature"})
    temperature: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        recorded: bool = False,
        temperature: float = 1.0,
        reduction: str | None = None,
    ) -> None:
        super().__init__(actor_network, reduction=reduction)
        self.recorded = recorded
        self.register_buffer("temperature", torch.tensor(float(temperature)))
        self._forward_value_estimator_keys()

    def _loss_keys(self) -> list[Keys]:
        keys = self.tensor_keys
        if self.recorded:
            return [keys.action, keys.reward, keys.group_mask]
        return [keys.reward_per_configuration]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of contexts, [P], with the keys above and those that the actor reads."""
        keys = self.tensor_keys
        rewards = tensordict.get(keys.reward if self.recorded else keys.reward_per_configuration)
        dist = self.actor_network.get_dist(tensordict)
        if self.recorded:
            log_probs = self._log_prob(dist, tensordict)
            mask = tensordict.get(keys.group_mask)
        else:
            log_probs = self._log_probs(dist)
            mask = ~rewards.isnan()
        loss = reward_weighted_cross_entropy(log_probs, rewards, self.temperature, mask)
        out = {"loss_rce": self._reduce_loss(loss, tensordict)}
        if self.diagnostics:
            with torch.no_grad():
                out["entropy"] = self._entropy(dist).mean()
        return TensorDict(out, batch_size=[])


class RegressionLoss(LossModule):
    """Minimise the errors of predicted outcomes of all configurations.

    Accuracies have a cross-entropy, log-latencies a Gaussian likelihood.

    Args:
        predictor: a module that writes `accuracy_logits`, `log_latency` and `spread`, [*, C] each;
            it is not called where the tensordict holds them already.
        reduction: `mean`, `sum` or `none` over contexts, None for `mean`; the loss of a context is
            the mean over its profiled configurations.

    Outputs: `loss_accuracy` and `loss_latency`.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            accuracy: float [*, C], measured, NaN where not profiled.
            log_latency: float [*, C], measured, ln ms, NaN where not profiled.
            variance: float [*, C], of a cell's measured log-latencies, if `log_latency` is their
                mean; may be left out.
        """

        accuracy: NestedKey = "accuracy_per_configuration"
        log_latency: NestedKey = "log_latency_per_configuration"
        variance: NestedKey = "log_latency_variance"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss_accuracy", "loss_latency"]

    def __init__(self, predictor: TensorDictModuleBase, *, reduction: str | None = None) -> None:
        super().__init__()
        self.predictor = predictor
        self.reduction = reduction or "mean"
        self._forward_value_estimator_keys()

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        self.in_keys = [
            *self.predictor.in_keys,
            self.tensor_keys.accuracy,
            self.tensor_keys.log_latency,
        ]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Compute the loss of contexts, [*], with the keys above and those the predictor reads."""
        predicted = tensordict
        if "accuracy_logits" not in tensordict:
            predicted = self.predictor(tensordict.select(*self.predictor.in_keys))
        accuracy = tensordict.get(self.tensor_keys.accuracy)
        log_latency = tensordict.get(self.tensor_keys.log_latency)
        variance = tensordict.get(self.tensor_keys.variance, None)
        if variance is not None:
            variance = variance.nan_to_num()
        # cells that were measured; finite numbers in the place of NaN, which is left out below
        profiled = ~accuracy.isnan()
        # a compiled graph cannot branch on data
        complete = not torch.compiler.is_compiling() and bool(profiled.all())
        if not complete:
            accuracy = accuracy.nan_to_num()
            log_latency = log_latency.nan_to_num()
        wrong = functional.binary_cross_entropy_with_logits(
            predicted.get("accuracy_logits"), accuracy, reduction="none"
        )
        off = gaussian_nll(
            log_latency, predicted.get("log_latency"), predicted.get("spread"), variance
        )
        out = {}
        for name, loss in (("loss_accuracy", wrong), ("loss_latency", off)):
            if complete:
                mean = loss.mean(-1)
            else:
                mean = torch.where(profiled, loss, 0.0).sum(-1) / profiled.sum(-1).clamp_min(1)
            out[name] = self._reduce_loss(mean, tensordict)
        return TensorDict(out, batch_size=[])
