"""The mathematics of training has not changed: losses and gradient norms, step by step, are those
that were committed.

The tolerance is some eight times what rounding does to these runs and far below what a change of a
formula does. Rounding: on one machine with PyTorch's kernels for AVX-512, for AVX2 and for neither,
MKL's for every processor alike, and with noise of one unit in the last place on the weights and of
three on every gradient, losses differ by up to 2e-6 and norms by up to 1.3e-5 of themselves. A
formula: two hundredths on one coefficient, below, is the smallest change that anybody would make,
and is ten times the tolerance or more. Of fifty changes by hand in a copy of the code (signs, sums
for means, clip, KL and its estimator, baseline and scale of advantages, temperatures, entropy,
regression, optimiser and schedule, which policy is the old one or the reference) forty-eight were
seen, nearly all by a hundred times the tolerance; the other two, a `detach` where there is no
gradient and < for ≤ where nothing is equal, change no number here.
"""

import copy
import json

import pytest
import torch
from trajectories import FILE, RUNS, SETTINGS, trajectory

RELATIVE, ABSOLUTE = 1e-4, 2e-5
COMMITTED = {
    name: torch.tensor(steps, dtype=torch.float64)
    for name, steps in json.loads(FILE.read_text()).items()
}
COEFFICIENTS = {
    ("controller sampled", "loss"): "advantage_clip clip_epsilon kl_to_ref_coeff entropy_coeff",
    ("controller sampled", "reward"): "miss",
    ("controller exact", "loss"): "clip_epsilon kl_to_ref_coeff entropy_coeff",
    ("controller exact", "optimiser"): "lr clip_grad",
    ("controller taught", "policy"): "sharpness",
    ("controller taught", "optimiser"): "pretrain_lr lr",
    ("selector RCE", "config"): "lr",
    ("selector GRPO", "loss"): "clip_epsilon kl_to_ref_coeff",
}


def off(result, committed):
    """By how many tolerances each loss and each norm is off, [steps, 2]."""
    return (result - committed).abs() / (ABSOLUTE + RELATIVE * committed.abs())


def most_off(name, group, key, value):
    """Return by how many tolerances a run with another setting is off at most."""
    settings = copy.deepcopy(SETTINGS[name])
    settings[group][key] = value
    return off(trajectory(name, settings), COMMITTED[name]).max()


@pytest.mark.parametrize("name", RUNS)
def test_every_step_is_the_committed_one(name):
    result = trajectory(name)
    assert result.shape == COMMITTED[name].shape
    wrong = (off(result, COMMITTED[name]) > 1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"""
        {name}: the training takes another course from step {wrong[0]} of {len(result)} on. If that
        is meant, make the trajectories anew with `PYTHONPATH=.:tests python tests/agents/training/trajectories.py` and
        commit {FILE.name} with the change and its reason; if not, a change of the mathematics
        slipped in."""


@pytest.mark.parametrize(
    ("name", "group", "key"),
    [(*place, key) for place, keys in COEFFICIENTS.items() for key in keys.split()],
)
def test_two_hundredths_more_on_a_coefficient_would_be_seen(name, group, key):
    assert most_off(name, group, key, 1.02 * SETTINGS[name][group][key]) > 10


def test_advantages_are_scaled():
    """Clip and KL are at work as well: without either a change of its coefficient would show
    nothing."""
    assert most_off("selector GRPO", "loss", "advantage", "centred") > 10
