"""What a teacher's network predicts, as the loss of its regression reads it."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from knobwise.agents.stack.teacher import Teacher


class PredictedOutcomes(TensorDictModuleBase):
    """What the network of a teacher predicts for rows of a table, as `RegressionLoss` reads it.

    Reads `row` int64 [M, n], a list of rows for each member, and writes `accuracy_logits`,
    `log_latency` and `spread` [M, n, C], and under weights `log_cost`.
    """

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, teacher: Teacher, features: Tensor) -> None:
        super().__init__()
        self.network = teacher.network
        self.features = features
        if teacher.network.weighs:
            self.out_keys = [*self.out_keys, "log_cost"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcomes = self.network(self.features[tensordict["row"]])
        for key in self.out_keys:
            tensordict[key] = getattr(outcomes, key)
        return tensordict
