"""The regression of a further cost: Poisson's likelihood, in units of the mean cost."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from knobwise.losses import RegressionLoss

NAN = torch.nan


def regressed(log_cost: torch.Tensor, cost: torch.Tensor) -> TensorDict:
    shape, names = cost.shape, ["accuracy_logits", "log_latency", "spread", "log_cost"]
    loss = RegressionLoss(TensorDictModule(lambda row: row, in_keys=["row"], out_keys=names))
    content = {
        "accuracy_logits": torch.zeros(shape),
        "log_latency": torch.zeros(shape),
        "spread": torch.ones(shape),
    }
    measured = torch.where(cost.isnan(), NAN, 1.0)
    content |= {"accuracy_per_configuration": measured, "log_latency_per_configuration": measured}
    return loss(
        TensorDict({**content, "log_cost": log_cost, "cost_per_configuration": cost}, shape[:1])
    )


def test_by_hand() -> None:
    out = regressed(
        torch.tensor([[0.0, math.log(2.0)], [0.0, 7.0]]), torch.tensor([[3.0, 0.0], [9.0, NAN]])
    )
    # e^l − k·l over the mean cost 4: (1 + 2) / 2 cells of the first context, 1 of the second
    assert float(out["loss_cost"]) == pytest.approx(((1 + 2) / 2 + 1) / 2 / 4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9])
def test_the_minimum_is_at_the_mean_in_any_unit(scale: float) -> None:
    cost = scale * torch.tensor([[0.0], [2.0], [10.0]])
    guess = torch.tensor(math.log(4.0 * scale), requires_grad=True)
    regressed(guess.expand(3, 1), cost)["loss_cost"].backward()
    assert guess.grad is not None
    assert float(guess.grad) == pytest.approx(0.0, abs=1e-5)
    off = torch.tensor(math.log(8.0 * scale), requires_grad=True)
    regressed(off.expand(3, 1), cost)["loss_cost"].backward()
    assert float(off.grad) == pytest.approx(1.0, rel=1e-4)  # type: ignore[arg-type]
