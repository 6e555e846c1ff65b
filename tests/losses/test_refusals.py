"""What a loss refuses: keys that are missing, and numbers that make it NaN or infinite."""

import math

import pytest
import torch
from actors import certain_actor, drawn, linear_actor
from helpers import close, input_error
from tensordict import TensorDict

from knobwise.losses import ExactGRPOLoss, GRPOLoss, RCELoss
from knobwise.losses.functional import ADVANTAGES
from knobwise.losses.settings import SelectorLossConfig

INFINITE = (math.nan, math.inf, -math.inf)
KNOBS = ["crops", "k"]
LOSSES = {
    "sampled": (GRPOLoss, {"kl_to_ref_coeff": 0.1}),
    "masked": (GRPOLoss, {"masked": True}),
    "exact": (ExactGRPOLoss, {"kl_to_ref_coeff": 0.1}),
    "rce": (RCELoss, {}),
    "recorded": (RCELoss, {"recorded": True}),
}
READ = [
    ("sampled", "action"),
    ("sampled", "action_log_prob"),
    ("sampled", ("next", "reward")),
    ("sampled", "reference_log_prob"),
    ("masked", "group_mask"),
    ("exact", "reward_per_configuration"),
    ("exact", "behaviour_log_probs"),
    ("exact", "reference_log_probs"),
    ("rce", "reward_per_configuration"),
    ("recorded", "action"),
    ("recorded", "group_mask"),
    ("recorded", ("next", "reward")),
]


def loss_of(kind, actor=None, **settings):
    module, defaults = LOSSES[kind]
    return module(actor or linear_actor(4), **(defaults | settings))


@pytest.mark.parametrize(("kind", "key"), READ, ids=str)
@pytest.mark.parametrize("diagnostics", [True, False])
def test_a_key_that_is_missing_is_named(kind, key, diagnostics):
    loss = loss_of(kind)
    loss.diagnostics = diagnostics
    loss(drawn(8, 4))
    with input_error(f"no {key!r}".replace("(", r"\(").replace(")", r"\)")):
        loss(drawn(8, 4).exclude(key))


@pytest.mark.parametrize("missing", [*KNOBS, "k_log_prob"])
def test_a_knob_that_is_missing_is_named(missing):
    actor = linear_actor(4, knobs=KNOBS)
    data = drawn(8, 4)
    with torch.no_grad():
        data = actor(data)
    GRPOLoss(actor)(data)
    with input_error(f"no '{missing}'"):
        GRPOLoss(actor)(data.exclude(missing))


NUMBERS = [pair for pair in READ if "action" not in pair and "group_mask" not in pair]
FINE = {("exact", "behaviour_log_probs"): -math.inf, ("rce", "reward_per_configuration"): math.nan}
"""What is not profiled."""
CASES = [
    (*pair, value) for pair in NUMBERS for value in INFINITE if repr(FINE.get(pair)) != repr(value)
]


@pytest.mark.parametrize(("kind", "key", "value"), CASES, ids=str)
@pytest.mark.parametrize("diagnostics", [True, False])
def test_a_number_that_is_not_finite_is_named_with_its_place(kind, key, value, diagnostics):
    loss = loss_of(kind)
    loss.diagnostics = diagnostics
    data = drawn(8, 4)
    data[key][5, 2] = value
    if value == -math.inf and issubclass(type(loss), RCELoss):
        # what is infinitely bad is not imitated
        assert loss(data)["loss_rce"].isfinite()
        return
    with input_error(rf"{str(key).strip('()')}.*at \[5, 2\]"):
        loss(data)


@pytest.mark.parametrize(("kind", "key"), FINE)
def test_what_was_not_profiled_is_not_refused(kind, key):
    data = drawn(8, 4)
    data[key][5, 2] = FINE[kind, key]
    assert all(value.isfinite() for value in loss_of(kind)(data).values())


def own(reward, weight):
    return reward - reward.mean(-1, keepdim=True)


@pytest.mark.parametrize("advantage", [*ADVANTAGES, own])
@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_a_reward_that_is_nan_is_to_blame_whatever_the_advantage(objective, advantage):
    data = drawn(8, 4)
    data["next", "reward"][5, 2] = math.nan
    data["reward_per_configuration"][5, 2] = math.nan
    with input_error(r"reward.* is nan at \[5, 2\]"):
        LOSSES[objective][0](linear_actor(4), advantage=advantage)(data)


# -- old log-probs of a policy far away ------------------------------------------------------------


def far_draws(first, second):
    """Two draws whose rewards are 1 and 0, with these old log-probs, of a policy .6, .4."""
    return TensorDict(
        {
            "observation": torch.ones(1, 1),
            "action": torch.tensor([[[0], [1]]]),
            "action_log_prob": torch.tensor([[first, second]]),
            "next": {"reward": torch.tensor([[1.0, 0.0]])},
        },
        [1],
    )


def test_a_better_draw_that_was_nearly_impossible_counts_as_much_as_the_clip_lets_it():
    loss = GRPOLoss(certain_actor(0.6, 0.4), advantage="zscore")
    out = loss(far_draws(-200.0, math.log(0.5)))
    # A = ±1: min(ρ, 1.2)·1 and .8·(−1)
    close(out["loss_objective"], -(1.2 - 0.8) / 2)
    out["loss_objective"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())


@pytest.mark.parametrize("diagnostics", [True, False])
def test_a_worse_draw_that_was_nearly_impossible_is_refused(diagnostics):
    loss = GRPOLoss(certain_actor(0.6, 0.4))
    loss.diagnostics = diagnostics
    with input_error(r"'action_log_prob' is -200 at \[0, 1\]"):
        loss(far_draws(math.log(0.5), -200.0))


def test_a_draw_that_gains_nothing_and_was_nearly_impossible_costs_nothing():
    data = far_draws(math.log(0.5), -200.0)
    data["next", "reward"][:] = 0.5
    assert GRPOLoss(certain_actor(0.6, 0.4))(data)["loss_objective"] == 0


def test_a_reference_too_far_away_is_refused():
    data = far_draws(math.log(0.6), math.log(0.4))
    data["reference_log_prob"] = torch.tensor([[500.0, -1.0]])
    loss = GRPOLoss(certain_actor(0.6, 0.4), kl_to_ref_coeff=0.1)
    with input_error(r"'reference_log_prob' is 500 at \[0, 0\]"):
        loss(data)
    loss.kl_to_ref_coeff = 0.0
    assert loss(data)["loss_objective"].isfinite()


def test_an_actor_whose_weights_are_nan_is_to_blame_itself():
    for kind in LOSSES:
        actor = linear_actor(4)
        loss = loss_of(kind, actor)
        for parameter in actor.parameters():
            parameter.data.fill_(math.nan)
        with input_error("actor"):
            loss(drawn(8, 4))


# -- settings ----------------------------------------------------------------------------------------

NO_NUMBERS = [
    *[
        ("sampled", name, value)
        for name in ("clip_epsilon", "advantage_std_floor", "advantage_std_eps")
        for value in (-1.0, math.nan)
    ],
    *[("sampled", "kl_to_ref_coeff", value) for value in (-1.0, math.nan, math.inf)],
    *[
        ("sampled", name, value)
        for name in ("reward_spread", "advantage_clip")
        for value in (-1.0, 0.0, math.inf)
    ],
    ("sampled", "clip_epsilon", (0.2, -0.1)),
    ("sampled", "top", 0),
    *[("rce", "temperature", value) for value in (0.0, -1.0, math.nan)],
]


@pytest.mark.parametrize(("kind", "name", "value"), NO_NUMBERS, ids=str)
def test_a_setting_that_cannot_be_used_is_named(kind, name, value):
    with input_error(name):
        loss_of(kind, **{name: value})


def test_an_infinite_temperature_is_a_plain_mean():
    actor = linear_actor(4)
    data = drawn(8, 4)
    log_probs = actor.get_dist(data).log_probs
    close(loss_of("rce", actor, temperature=math.inf)(data)["loss_rce"], -log_probs.mean())


# -- what does not count ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["masked", "recorded"])
def test_what_is_outside_the_mask_may_be_anything(kind):
    wanted = loss_of(kind)(drawn(8, 4))
    data = drawn(8, 4)
    for key in ("action_log_prob", "reference_log_prob", ("next", "reward")):
        data[key][~data["group_mask"]] = math.nan
    result = loss_of(kind)(data)
    for name, value in wanted.items():
        close(result[name], value)


def test_contexts_that_are_padding_may_be_anything():
    wanted = GRPOLoss(linear_actor(4))(drawn(8, 4)[:6])
    data = drawn(8, 4)
    data["next", "reward"][6:] = math.nan
    data["collector", "mask"] = torch.arange(8) < 6
    close(GRPOLoss(linear_actor(4))(data)["loss_objective"], wanted["loss_objective"])
    data["next", "reward"][1, 3] = math.nan
    with input_error(r"at \[1, 3\]"):
        GRPOLoss(linear_actor(4))(data)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kl_to_ref_coeff", {"kl_to_ref_coeff": math.inf}),
        ("reward_spread", {"reward_spread": math.inf}),
        ("positive_above", {"positive_above": math.nan, "min_positive": 0.5}),
        # without a share it would have no effect
        ("positive_above", {"positive_above": 0.5}),
    ],
)
def test_an_option_that_cannot_be_used_is_named(name, settings):
    with input_error(f"loss.{name}"):
        SelectorLossConfig(**settings)
