"""Finding the configuration that has the knob values of an action."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ActionIndex(nn.Module):
    """Finds the configurations with given knob values, even if most combinations do not exist.

    The configurations are int64 [C, K]: the index of each knob's value. Actions int64 [*, K] become
    indices of configurations int64 [*], −1 if no configuration has these values.
    """

    codes: Tensor
    order: Tensor

    def __init__(self, configurations: Tensor) -> None:
        super().__init__()
        # A knob's value is a digit. One more digit at either end stands for all values that do not
        # exist. The lower one is −1; `raised` lifts codes that index `order` to 0 and above.
        self.most = int(configurations.max()) + 1
        base = self.most + 2
        width = configurations.shape[1]
        self.dense = base**width <= 1 << 20
        self.strides = [base**knob for knob in range(width)]
        if base**width >= 1 << 62:  # more combinations than int64 can number: hash them instead
            drawn = torch.randint(1 << 62, (width,), generator=torch.Generator().manual_seed(0))
            self.strides = [1, *drawn[1:].tolist()]
        self.raised = sum(self.strides) if self.dense else 0
        codes, order = self._code(configurations).sort()
        # with few combinations a table by code is faster than a search
        if self.dense:
            order = torch.full((base**width,), -1).scatter_(0, codes, order)
            codes = codes[:0]
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("order", order, persistent=False)

    def _code(self, actions: Tensor) -> Tensor:
        first, *others = actions.clamp(-1, self.most).unbind(-1)
        # the first stride is 1; sums of all but the raised digits are written in place
        if not others:
            return first + self.raised
        code = torch.add(first, others[0], alpha=self.strides[1])
        for digit, stride in zip(others[1:], self.strides[2:], strict=True):
            code.add_(digit, alpha=stride)
        return code.add_(self.raised)

    def forward(self, actions: Tensor) -> Tensor:
        code = self._code(actions)
        if self.dense:
            # several times as fast as `take`
            return self.order.index_select(0, code.flatten()).view(code.shape)
        index = torch.searchsorted(self.codes, code).clamp_max(len(self.codes) - 1)
        return torch.where(self.codes[index] == code, self.order[index], -1)
