"""What `GRPOLoss` and the settings of a run both have, they call the same and begin with."""

import dataclasses
import inspect

from knobwise.losses import ExactGRPOLoss, GRPOLoss
from knobwise.losses.grpo import GroupLoss
from knobwise.losses.settings import GRPOConfig, LossConfig, SelectorLossConfig

OF_A_MODULE = {"actor_network", "reduction", "functional"}
CHANGED_WHILE_IT_TRAINS = {"top"}
KNOWN_BY_A_STAGE = {"kl_to_ref_coeff": (0.0, None), "entropy_coeff": (0.0, None)}
"""A loss by itself knows no teacher and no warm-up: β and η, then those of a stage."""


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.name != "self"}


def test_names_and_defaults_are_those_of_the_settings():
    loss = defaults(GroupLoss.__init__)
    settings = {field.name: field.default for field in dataclasses.fields(LossConfig)}
    shared = loss.keys() - OF_A_MODULE - CHANGED_WHILE_IT_TRAINS
    assert shared <= settings.keys()
    different = {
        name: (loss[name], settings[name]) for name in shared if loss[name] != settings[name]
    }
    assert different == KNOWN_BY_A_STAGE


def test_the_losses_take_what_the_settings_give_and_nothing_is_renamed():
    for config in (GRPOConfig, LossConfig, SelectorLossConfig):
        given = config().of_grpo()
        assert given == {name: getattr(config(), name) for name in given}
        # a stage sets the unit of rewards itself
        assert given.keys() | {"reward_spread"} == (
            defaults(GroupLoss.__init__).keys() - OF_A_MODULE - CHANGED_WHILE_IT_TRAINS
        )
    for loss in (GRPOLoss, ExactGRPOLoss):
        own = defaults(loss.__init__).keys() - {"actor_network", "settings"}
        assert own <= {"masked"}
