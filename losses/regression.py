"""The warm start of a policy that predicts outcomes: regression on measured accuracy and latency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn import functional
from torchrl.objectives import LossModule


def gaussian_nll(target: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """−ln N(target | mean, spread²) but for a constant: (target − mean)²/(2·spread²) + ln spread. Shapes broadcast."""
    return 0.5 * ((target - mean) / spread).square() + spread.log()


class RegressionLoss(LossModule):
    """Cross-entropy of predicted accuracies and Gaussian likelihood of predicted log-latencies, of all configurations.

    Args:
        predictor: a module that writes `accuracy_logits`, `log_latency` and `spread`, [*, C] each; it is not called
            where the tensordict holds them already.
        reduction: `mean`, `sum` or `none` over contexts; each is the mean over its profiled configurations.

    Outputs: `loss_accuracy`, `loss_latency`.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the tensordict.

        Attributes:
            accuracy: float [*, C], measured, NaN where not profiled.
            log_latency: float [*, C], measured, ln ms, NaN where not profiled.
        """

        accuracy: NestedKey = "accuracy_per_configuration"
        log_latency: NestedKey = "log_latency_per_configuration"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ["loss_accuracy", "loss_latency"]

    def __init__(self, predictor: TensorDictModuleBase, *, reduction: str = "mean") -> None:
        super().__init__()
        self.predictor = predictor
        self.reduction = reduction
        self._forward_value_estimator_keys()

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        self.in_keys = [*self.predictor.in_keys, self.tensor_keys.accuracy, self.tensor_keys.log_latency]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch of contexts.

        Args:
            tensordict: batch [*] with the keys above and those that the predictor reads.
        """
        predicted = tensordict
        if "accuracy_logits" not in tensordict:
            predicted = self.predictor(tensordict.select(*self.predictor.in_keys))
        accuracy, log_latency = tensordict.get(self.tensor_keys.accuracy), tensordict.get(self.tensor_keys.log_latency)
        profiled = ~accuracy.isnan()
        count = profiled.sum(-1).clamp_min(1)
        wrong = functional.binary_cross_entropy_with_logits(
            predicted.get("accuracy_logits"), accuracy.nan_to_num(), reduction="none"
        )
        off = gaussian_nll(log_latency.nan_to_num(), predicted.get("log_latency"), predicted.get("spread"))
        means = [torch.where(profiled, loss, 0.0).sum(-1) / count for loss in (wrong, off)]
        reduced = [self._reduce_loss(mean, tensordict) for mean in means]
        return TensorDict(dict(zip(self.out_keys, reduced, strict=True)), batch_size=[])
