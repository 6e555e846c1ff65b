"""A coefficient follows a measured KL: up by half, down by a third, a temperature by a tenth the
other way."""

import pytest
import torch

from knobwise.losses.kl_control import temperature_control, weight_control

BAND = (0.01, 0.1)


@pytest.mark.parametrize(
    ("make", "kls", "wanted"),
    [
        (weight_control, [0.2], 1.5),
        (weight_control, [0.05], 1.0),  # inside the band
        (weight_control, [0.001], 1 / 1.5),
        (weight_control, [0.001] * 60, 1e-3),  # and no lower
        (weight_control, [9.0] * 60, 10.0),  # and no higher
        (temperature_control, [0.2], 1 / 1.1),
        (temperature_control, [0.001], 1.1),
        (temperature_control, [0.001] * 60, 2.0),
        (temperature_control, [9.0] * 60, 0.5),
    ],
)
def test_a_coefficient_follows_the_kl(make, kls, wanted):
    coefficient = torch.tensor(1.0)
    control = make(coefficient, BAND)
    for kl in kls:
        control.step(kl)
    assert float(coefficient) == pytest.approx(wanted)


def test_a_weight_of_zero_rises_to_the_least():
    coefficient = torch.tensor(0.0)
    weight_control(coefficient, BAND).step(1.0)
    assert float(coefficient) == pytest.approx(1e-3)
