"""A batch of any shape, as TorchRL writes it: `[]` for one context, `[8]`, `[2, 3]`."""

from functools import partial

import pytest
import torch
from helpers import close, five_beams, input_error, repeated, small_table
from torchrl.collectors import Collector
from torchrl.envs import ActionMask, SerialEnv, StepCounter, TransformedEnv, check_env_specs

from knobwise.agents import Controller, PolicyConfig, make_actor
from knobwise.envs import ConfigBandit, DemonstrationBandit

TABLE = repeated(small_table(holes=0.3), jitter=0.5)
SHAPES = ([], [3], (2, 3), torch.Size([]), torch.Size([6]))
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
FORMS = [
    {**kind, "group_size": group}
    for kind in ({}, {"action": "configuration"}, {"action_keys": "knobs"})
    for group in (None, 1, 2)
]
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def configurations(shape, **options):
    return ConfigBandit(TABLE, batch_size=shape, seed=3, **options)


def demonstrations(shape, **options):
    return DemonstrationBandit(five_beams(), batch_size=shape, seed=3, **options)


def is_that_of_one_axis(make, shape, **options):
    """Contexts and outcomes are those of one axis of as many contexts."""
    env = make(shape, **options)
    flat = make(env.batch_size.numel(), **options)
    torch.manual_seed(0)
    seen = env.step(env.rand_action(env.reset()))
    wanted = flat.reset()
    for key in env.action_keys:
        action = seen[key]
        wanted[key] = action.reshape(-1, *action.shape[len(env.batch_size) :])
    wanted = flat.step(wanted)
    assert seen.batch_size == torch.Size(shape)
    for key, values in seen.flatten_keys().items():
        expected = wanted.flatten_keys()[key]
        assert values.shape[: len(shape)] == torch.Size(shape)
        close(values.reshape(expected.shape), expected)


@every_shape
@every_form
def test_configurations_in_any_shape(shape, form):
    env = configurations(shape, full_information=True, **form)
    check_env_specs(env, seed=0, break_when_any_done=False)
    check_env_specs(
        configurations(shape, observe_features=False, **form), seed=0, break_when_any_done=False
    )
    is_that_of_one_axis(configurations, shape, full_information=True, **form)


@every_shape
@pytest.mark.parametrize("action", ["places", "sequence"])
@pytest.mark.parametrize("group", [None, 2, "all"])
def test_demonstrations_in_any_shape(shape, action, group):
    options = {"action": action, "group_size": group}
    check_env_specs(demonstrations(shape, **options), seed=0, break_when_any_done=False)
    is_that_of_one_axis(demonstrations, shape, **options)


@every_shape
def test_inside_wrappers(shape):
    made = partial(configurations, shape, action="configuration")
    masked = TransformedEnv(made(unprofiled="error"), ActionMask(mask_key="mask"))
    check_env_specs(masked, seed=0, break_when_any_done=False)
    assert masked.rollout(5, break_when_any_done=False).batch_size == torch.Size([*shape, 5])
    counted = TransformedEnv(configurations(shape), StepCounter())
    check_env_specs(counted, seed=0, break_when_any_done=False)
    several = SerialEnv(2, made)
    check_env_specs(several, seed=0, break_when_any_done=False)
    assert several.rollout(4, break_when_any_done=False)["next", "reward"].shape == (
        2,
        *shape,
        4,
        1,
    )


@every_shape
@pytest.mark.parametrize("form", [{}, {"action_keys": "knobs"}, {"group_size": 4}], ids=str)
def test_a_policy_in_a_collector(shape, form):
    env = configurations(shape, **form)
    controller = Controller.for_table(TABLE, torch.arange(60), PolicyConfig(hidden=8))
    group = form.get("group_size")
    policy = make_actor(controller, group_size=group, separate="action_keys" in form)
    count = 3 * env.batch_size.numel()
    (batch,) = Collector(
        env,
        policy,
        frames_per_batch=count,
        total_frames=count,
        auto_register_policy_transforms=False,
    )
    assert batch["next", "reward"].shape == (*shape, 3, group or 1)


def test_a_context_of_ones_own_by_hand():
    env = configurations([])
    contexts = env.reset()
    contexts["row"] = torch.tensor(7)
    contexts["budget_ms"] = torch.tensor(12.0)
    contexts["action"] = TABLE.configurations[0]
    step = env.step(contexts)["next"]
    assert step["row"] == 7
    assert step["image_features"].shape == TABLE.features["image_features"][7].shape


@pytest.mark.parametrize("make", [configurations, demonstrations])
@pytest.mark.parametrize("shape", [0, -1, [0], [2, -1], "8", 1.5, None, [None]], ids=str)
def test_what_is_no_shape_is_refused(make, shape):
    with input_error("batch_size"):
        make(shape)
