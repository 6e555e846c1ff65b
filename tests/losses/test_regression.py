import math

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from knobwise.losses import RegressionLoss
from knobwise.losses.functional import gaussian_nll

NAN = math.nan


class Says(TensorDictModuleBase):
    """Predicts the same of every context, [C] each."""

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, logits: list[float], log_latency: list[float], spread: list[float]) -> None:
        super().__init__()
        values = (logits, log_latency, spread)
        self.said = nn.ParameterList([nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in values])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        for key, value in zip(self.out_keys, self.said, strict=True):
            tensordict[key] = value.expand(*tensordict["row"].shape, -1)
        return tensordict


def measured(accuracy: list[list[float]], log_latency: list[list[float]]) -> TensorDict:
    cells = {
        "accuracy_per_configuration": torch.tensor(accuracy, dtype=torch.float64),
        "log_latency_per_configuration": torch.tensor(log_latency, dtype=torch.float64),
    }
    return TensorDict({"row": torch.arange(len(accuracy)), **cells}, [len(accuracy)])


BY_HAND = measured([[1.0, 0.25], [NAN, 0.0]], [[2.0, 0.0], [NAN, 3.0]])
PREDICTED = ([math.log(3), 0.0], [1.0, 1.0], [0.5, 2.0])


def test_gaussian_nll_by_hand_and_by_torch() -> None:
    by_hand = gaussian_nll(torch.tensor(5.0), torch.tensor(2.0), torch.tensor(2.0))
    assert by_hand.item() == pytest.approx(9 / 8 + math.log(2))
    target, mean, spread = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    spread = spread.exp()
    stock = -torch.distributions.Normal(mean, spread).log_prob(target)
    torch.testing.assert_close(gaussian_nll(target, mean, spread) + 0.5 * math.log(2 * math.pi), stock)


def test_both_losses_by_hand() -> None:
    out = RegressionLoss(Says(*PREDICTED), reduction="none")(BY_HAND)
    # p = ¾ and ½: first context −ln ¾ and ln 2 (a quarter right: ¼·ln 2 + ¾·ln 2), second ln 2 of its one cell
    accuracy = [(-math.log(0.75) + math.log(2)) / 2, math.log(2)]
    # (1/.5)²/2 + ln .5 and (1/2)²/2 + ln 2, mean (2 + .125)/2; then (2/2)²/2 + ln 2
    latency = [(2 + 0.125) / 2, 0.5 + math.log(2)]
    torch.testing.assert_close(out["loss_accuracy"], torch.tensor(accuracy, dtype=torch.float64))
    torch.testing.assert_close(out["loss_latency"], torch.tensor(latency, dtype=torch.float64))
    mean = RegressionLoss(Says(*PREDICTED))(BY_HAND)
    assert float(mean["loss_accuracy"].detach()) == pytest.approx(sum(accuracy) / 2)
    assert float(mean["loss_latency"].detach()) == pytest.approx(sum(latency) / 2)
    total = RegressionLoss(Says(*PREDICTED), reduction="sum")(BY_HAND)
    assert float(total["loss_latency"].detach()) == pytest.approx(sum(latency))


def test_what_was_not_profiled_gets_no_gradient_and_spoils_none() -> None:
    predictor = Says(*PREDICTED)
    only_second = measured([[NAN, 1.0], [NAN, 0.0]], [[NAN, 2.0], [NAN, 1.0]])
    out = RegressionLoss(predictor)(only_second)
    (out["loss_accuracy"] + out["loss_latency"]).backward()
    for said in predictor.said:
        assert said.grad[0] == 0
        assert said.grad[1].isfinite()
    # σ(0) − mean target; −(mean target − mean)/spread²; (1 − mean squared z)/spread: z = ½ and 0
    assert predictor.said[0].grad[1] == pytest.approx(0.5 - 0.5)
    assert predictor.said[1].grad[1] == pytest.approx(-0.5 / 4)
    assert predictor.said[2].grad[1] == pytest.approx((1 - 0.125) / 2)


def test_a_context_of_which_nothing_was_profiled_counts_nothing() -> None:
    out = RegressionLoss(Says(*PREDICTED), reduction="none")(measured([[NAN, NAN]], [[NAN, NAN]]))
    assert out["loss_accuracy"].tolist() == out["loss_latency"].tolist() == [0.0]


def test_the_least_loss_is_at_the_means_and_the_spread_of_what_was_measured() -> None:
    data = measured([[1.0], [0.0], [1.0], [1.0]], [[1.0], [2.0], [3.0], [4.0]])
    predictor = Says([0.0], [0.0], [1.0])
    loss, optimiser = RegressionLoss(predictor), torch.optim.Adam(predictor.parameters(), lr=0.05)
    for _ in range(600):
        optimiser.zero_grad()
        sum(loss(data).values()).backward()  # type: ignore[union-attr]
        optimiser.step()
    logit, mean, spread = (said.item() for said in predictor.said)
    assert torch.sigmoid(torch.tensor(logit)).item() == pytest.approx(0.75, abs=0.01)
    assert (mean, spread) == (pytest.approx(2.5, abs=0.01), pytest.approx(math.sqrt(1.25), abs=0.01))


def test_leading_axes_are_free_and_keys_can_be_renamed() -> None:
    loss = RegressionLoss(Says(*PREDICTED), reduction="none")
    assert loss.in_keys == ["row", "accuracy_per_configuration", "log_latency_per_configuration"]
    assert loss(BY_HAND.reshape(1, 2))["loss_latency"].shape == (1, 2)
    loss.set_keys(accuracy="right")
    assert loss.in_keys == ["row", "right", "log_latency_per_configuration"]
    renamed = BY_HAND.clone().rename_key_("accuracy_per_configuration", "right")
    wanted = RegressionLoss(Says(*PREDICTED), reduction="none")(BY_HAND)
    assert torch.equal(loss(renamed)["loss_accuracy"], wanted["loss_accuracy"])


def test_it_takes_keywords_in_the_place_of_a_tensordict() -> None:
    found: tuple[Tensor, Tensor] = RegressionLoss(Says(*PREDICTED))(**BY_HAND.to_dict())
    wanted = RegressionLoss(Says(*PREDICTED))(BY_HAND)
    assert [float(f.detach()) for f in found] == [float(w.detach()) for w in wanted.values()]
