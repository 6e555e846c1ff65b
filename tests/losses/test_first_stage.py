"""The two losses of the first stage: reward-weighted cross-entropy, and regression on what was
measured."""

import math

import pytest
import torch
from actors import certain_actor
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn

from knobwise.losses import RCELoss, RegressionLoss

NAN = math.nan


def contexts(*rewards):
    """One context with these rewards."""
    return TensorDict(
        {"observation": torch.ones(1, 1), "reward_per_configuration": torch.tensor([rewards])}, [1]
    )


def test_rce_by_hand_and_its_temperature_may_be_set_between_steps():
    loss, data = RCELoss(certain_actor([0.2, 0.8]), temperature=0.5), contexts(0.0, math.log(3) / 2)
    out = loss(data)
    assert out["loss_rce"].item() == pytest.approx(
        -(0.25 * math.log(0.2) + 0.75 * math.log(0.8))
    )  # target ¼ : ¾
    assert out["entropy"].item() == pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)))
    loss.temperature = 0.25
    assert loss(data)["loss_rce"].item() == pytest.approx(
        -(0.1 * math.log(0.2) + 0.9 * math.log(0.8))
    )  # ⅒ : ⁹⁄₁₀
    # NaN means that a configuration takes no part
    loss = RCELoss(certain_actor([0.2, 0.5, 0.3]), temperature=1.0)
    assert loss(contexts(0.0, math.nan, 0.0))["loss_rce"].item() == pytest.approx(
        -(math.log(0.2) + math.log(0.3)) / 2
    )


class Says(TensorDictModuleBase):
    """Predicts the same of every context, [C] each."""

    in_keys = ["row"]
    out_keys = ["accuracy_logits", "log_latency", "spread"]

    def __init__(self, logits, log_latency, spread):
        super().__init__()
        values = (logits, log_latency, spread)
        self.outputs = nn.ParameterList(
            [nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in values]
        )

    def forward(self, tensordict):
        for key, value in zip(self.out_keys, self.outputs, strict=True):
            tensordict[key] = value.expand(*tensordict["row"].shape, -1)
        return tensordict


def measured(accuracy, log_latency):
    cells = {
        "accuracy_per_configuration": torch.tensor(accuracy, dtype=torch.float64),
        "log_latency_per_configuration": torch.tensor(log_latency, dtype=torch.float64),
    }
    return TensorDict({"row": torch.arange(len(accuracy)), **cells}, [len(accuracy)])


BY_HAND = measured([[1.0, 0.25], [NAN, 0.0]], [[2.0, 0.0], [NAN, 3.0]])
PREDICTED = ([math.log(3), 0.0], [1.0, 1.0], [0.5, 2.0])


def test_both_losses_by_hand():
    out = RegressionLoss(Says(*PREDICTED), reduction="none")(BY_HAND)
    # p = ¾ and ½: first context −ln ¾ and ln 2 (a quarter right: ¼·ln 2 + ¾·ln 2), second ln 2 of
    # its one cell
    accuracy = [(-math.log(0.75) + math.log(2)) / 2, math.log(2)]
    # (1/.5)²/2 + ln .5 and (1/2)²/2 + ln 2, mean (2 + .125)/2; then (2/2)²/2 + ln 2
    latency = [(2 + 0.125) / 2, 0.5 + math.log(2)]
    torch.testing.assert_close(out["loss_accuracy"], torch.tensor(accuracy, dtype=torch.float64))
    torch.testing.assert_close(out["loss_latency"], torch.tensor(latency, dtype=torch.float64))
    for reduction, count in ((None, 2), ("sum", 1)):
        reduced = RegressionLoss(Says(*PREDICTED), reduction=reduction)(BY_HAND)
        assert float(reduced["loss_accuracy"].detach()) == pytest.approx(sum(accuracy) / count)
        assert float(reduced["loss_latency"].detach()) == pytest.approx(sum(latency) / count)


def test_mean_and_variance_of_several_measurements_give_the_mean_of_their_losses():
    apart = [measured([[1.0, 0.25]], [[2.0, low]]) for low in (0.0, 1.0, 5.0)]
    losses = [RegressionLoss(Says(*PREDICTED))(each)["loss_latency"] for each in apart]
    together = measured([[1.0, 0.25]], [[2.0, 2.0]])
    together["log_latency_variance"] = torch.tensor(
        [[0.0, 14 / 3]], dtype=torch.float64
    )  # (4 + 1 + 9) / 3
    torch.testing.assert_close(
        RegressionLoss(Says(*PREDICTED))(together)["loss_latency"], torch.stack(losses).mean()
    )
    together["log_latency_variance"] = torch.full((1, 2), torch.nan, dtype=torch.float64)
    assert RegressionLoss(Says(*PREDICTED))(together)["loss_latency"].isfinite()


def test_what_was_not_profiled_gets_no_gradient_and_spoils_none():
    predictor = Says(*PREDICTED)
    only_second = measured([[NAN, 1.0], [NAN, 0.0]], [[NAN, 2.0], [NAN, 1.0]])
    out = RegressionLoss(predictor)(only_second)
    (out["loss_accuracy"] + out["loss_latency"]).backward()
    gradients = torch.stack([output.grad for output in predictor.outputs])
    assert not gradients[:, 0].any()
    # σ(0) − mean target; −(mean target − mean)/spread²; (1 − mean squared z)/spread: z = ½ and 0
    assert gradients[:, 1].tolist() == pytest.approx([0.5 - 0.5, -0.5 / 4, (1 - 0.125) / 2])
    # nor does a context of which nothing was profiled count
    out = RegressionLoss(Says(*PREDICTED), reduction="none")(measured([[NAN, NAN]], [[NAN, NAN]]))
    assert out["loss_accuracy"].tolist() == out["loss_latency"].tolist() == [0.0]


def test_leading_axes_are_free_keys_can_be_renamed_and_keywords_taken():
    loss = RegressionLoss(Says(*PREDICTED), reduction="none")
    assert loss.in_keys == ["row", "accuracy_per_configuration", "log_latency_per_configuration"]
    assert loss(BY_HAND.reshape(1, 2))["loss_latency"].shape == (1, 2)
    loss.set_keys(accuracy="right")
    assert loss.in_keys == ["row", "right", "log_latency_per_configuration"]
    renamed = BY_HAND.clone().rename_key_("accuracy_per_configuration", "right")
    plain = RegressionLoss(Says(*PREDICTED), reduction="none")
    wanted = plain(BY_HAND)
    assert torch.equal(loss(renamed)["loss_accuracy"], wanted["loss_accuracy"])
    assert all(map(torch.equal, plain(**BY_HAND.to_dict()), wanted.values()))
    plain.select_out_keys("loss_latency")
    assert torch.equal(plain(**BY_HAND.to_dict()), wanted["loss_latency"])
