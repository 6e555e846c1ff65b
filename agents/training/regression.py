"""The predictions of a teacher's network, in the form that the loss of its regression reads."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from knobwise.agents.stack.teacher import Teacher


class PredictedOutcomes(TensorDictModuleBase):
    """A module that predicts the outcomes of samples by a teacher's network, for `RegressionLoss`.

    Reads `row` int64 [M, n], the rows of each member. Writes `accuracy_logits`, `log_latency` and
    `spread` [M, n, C].

    Args:
        teacher: the teacher; only its network is read.
        features: normalised features of the whole table, [N, width].
    """

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, teacher: Teacher, features: Tensor) -> None:
        super().__init__()
        self.network = teacher.network
        self.features = features

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcomes = self.network(self.features[tensordict["row"]])
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key)
        return tensordict
