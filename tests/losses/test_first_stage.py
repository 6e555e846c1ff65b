"""The two losses of the first stage: reward-weighted cross-entropy, and regression on what was
measured."""

from math import log, nan

import pytest
import torch
from actors import certain_actor
from tensordict import TensorDict

from knobwise.losses import RCELoss
from knobwise.losses.regression import regression_losses


@pytest.mark.parametrize(
    ("probabilities", "temperature", "rewards", "wanted"),
    [
        ([0.2, 0.8], 0.5, [0.0, log(3) / 2], 0.25 * log(0.2) + 0.75 * log(0.8)),  # target ¼ : ¾
        # NaN means that a configuration takes no part
        ([0.2, 0.5, 0.3], 1.0, [0.0, nan, 0.0], (log(0.2) + log(0.3)) / 2),
    ],
)
def test_rce_by_hand_and_its_temperature_may_be_set_between_steps(
    probabilities, temperature, rewards, wanted
):
    loss = RCELoss(certain_actor(*probabilities), temperature=temperature)
    rewards = torch.tensor([rewards])
    data = {"observation": torch.ones(1, 1), "reward_per_configuration": rewards}
    out = loss(TensorDict(data, [1]))
    assert out["loss_rce"].item() == pytest.approx(-wanted)
    entropy = -sum(p * log(p) for p in probabilities)
    assert out["entropy"].item() == pytest.approx(entropy)
    # twice the rewards at twice the temperature
    rewards *= 2
    loss.temperature *= 2
    assert loss(TensorDict(data, [1]))["loss_rce"].item() == pytest.approx(-wanted)


def doubles(*columns):
    return [torch.tensor(values, dtype=torch.float64) for values in columns]


BY_HAND = doubles([[1.0, 0.25], [nan, 0.0]], [[2.0, 0.0], [nan, 3.0]], [[nan] * 2])
"""Accuracies, log-latencies and their variances, [P, C] each."""
PREDICTED = doubles([log(3), 0.0], [1.0, 1.0], [0.5, 2.0])
"""Logits of accuracies, log-latencies and their spreads, [C] each."""


def losses_of(cells, predicted=PREDICTED):
    """With the same prediction for every context."""
    return regression_losses([values.expand_as(cells[0]) for values in predicted], *cells)


def test_both_losses_by_hand():
    wrong, off = losses_of(BY_HAND)
    # p = ¾ and ½: first context −ln ¾ and ln 2 (a quarter right: ¼·ln 2 + ¾·ln 2), second ln 2 of
    # its one cell
    accuracy = [(-log(0.75) + log(2)) / 2, log(2)]
    # (1/.5)²/2 + ln .5 and (1/2)²/2 + ln 2, mean (2 + .125)/2; then (2/2)²/2 + ln 2
    latency = [(2 + 0.125) / 2, 0.5 + log(2)]
    assert wrong.tolist() == pytest.approx(accuracy)
    assert off.tolist() == pytest.approx(latency)
    whole = [part[:1] for part in BY_HAND]  # without a hole
    assert float(losses_of(whole)[0]) == pytest.approx(accuracy[0])


def test_mean_and_variance_of_several_measurements_give_the_mean_of_their_losses():
    right = [[1.0, 0.25]]
    apart = [doubles(right, [[2.0, low]], [[nan] * 2]) for low in (0.0, 1.0, 5.0)]
    losses = [float(losses_of(each)[1]) for each in apart]
    # (4 + 1 + 9) / 3
    _, off = losses_of(doubles(right, [[2.0, 2.0]], [[0.0, 14 / 3]]))
    assert float(off) == pytest.approx(sum(losses) / 3)


def test_what_was_not_profiled_gets_no_gradient_and_spoils_none():
    predicted = [values.clone().requires_grad_() for values in PREDICTED]
    only_second = [[nan, 1.0], [nan, 0.0]], [[nan, 2.0], [nan, 1.0]], [[nan] * 2]
    wrong, off = losses_of(doubles(*only_second), predicted)
    (wrong.mean() + off.mean()).backward()
    gradients = torch.stack([output.grad for output in predicted])
    assert not gradients[:, 0].any()
    # σ(0) − mean target; −(mean target − mean)/spread²; (1 − mean squared z)/spread: z = ½ and 0
    assert gradients[:, 1].tolist() == pytest.approx([0.5 - 0.5, -0.5 / 4, (1 - 0.125) / 2])
    # nor does a context of which nothing was profiled count
    nothing = [[nan, nan]]
    wrong, off = losses_of(doubles(nothing, nothing, nothing))
    assert (float(wrong), float(off)) == (0.0, 0.0)
