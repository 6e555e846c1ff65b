"""The two losses of the first stage: reward-weighted cross-entropy, and regression on what was
measured."""

import math

import pytest
import torch
from actors import certain_actor
from tensordict import TensorDict

from knobwise.losses import RCELoss
from knobwise.losses.functional import regression_losses

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


def says(logits, log_latency, spread):
    """The same prediction for every context, [C] each."""
    return [torch.tensor(v, dtype=torch.float64) for v in (logits, log_latency, spread)]


def measured(accuracy, log_latency, variance=None):
    """Accuracies, log-latencies and their variances, [P, C] each."""
    variance = variance or [[NAN] * len(accuracy[0])]
    return [torch.tensor(v, dtype=torch.float64) for v in (accuracy, log_latency, variance)]


BY_HAND = measured([[1.0, 0.25], [NAN, 0.0]], [[2.0, 0.0], [NAN, 3.0]])
PREDICTED = says([math.log(3), 0.0], [1.0, 1.0], [0.5, 2.0])


def losses_of(cells, predicted=PREDICTED):
    """With the same prediction for every context."""
    return regression_losses([values.expand_as(cells[0]) for values in predicted], *cells)


def test_both_losses_by_hand():
    wrong, off = losses_of(BY_HAND)
    # p = ¾ and ½: first context −ln ¾ and ln 2 (a quarter right: ¼·ln 2 + ¾·ln 2), second ln 2 of
    # its one cell
    accuracy = [(-math.log(0.75) + math.log(2)) / 2, math.log(2)]
    # (1/.5)²/2 + ln .5 and (1/2)²/2 + ln 2, mean (2 + .125)/2; then (2/2)²/2 + ln 2
    latency = [(2 + 0.125) / 2, 0.5 + math.log(2)]
    torch.testing.assert_close(wrong, torch.tensor(accuracy, dtype=torch.float64))
    torch.testing.assert_close(off, torch.tensor(latency, dtype=torch.float64))
    whole = [part[:1] for part in BY_HAND]  # without a hole
    assert float(losses_of(whole)[0]) == pytest.approx(accuracy[0])


def test_mean_and_variance_of_several_measurements_give_the_mean_of_their_losses():
    apart = [measured([[1.0, 0.25]], [[2.0, low]]) for low in (0.0, 1.0, 5.0)]
    losses = [losses_of(each)[1] for each in apart]
    # (4 + 1 + 9) / 3
    together = measured([[1.0, 0.25]], [[2.0, 2.0]], [[0.0, 14 / 3]])
    off = losses_of(together)[1]
    torch.testing.assert_close(off, torch.stack(losses).mean(0))


def test_what_was_not_profiled_gets_no_gradient_and_spoils_none():
    predicted = [values.requires_grad_() for values in says(*map(torch.Tensor.tolist, PREDICTED))]
    only_second = measured([[NAN, 1.0], [NAN, 0.0]], [[NAN, 2.0], [NAN, 1.0]])
    wrong, off = losses_of(only_second, predicted)
    (wrong.mean() + off.mean()).backward()
    gradients = torch.stack([output.grad for output in predicted])
    assert not gradients[:, 0].any()
    # σ(0) − mean target; −(mean target − mean)/spread²; (1 − mean squared z)/spread: z = ½ and 0
    assert gradients[:, 1].tolist() == pytest.approx([0.5 - 0.5, -0.5 / 4, (1 - 0.125) / 2])
    # nor does a context of which nothing was profiled count
    nothing = losses_of(measured([[NAN, NAN]], [[NAN, NAN]]))
    assert [loss.tolist() for loss in nothing] == [[0.0], [0.0]]
