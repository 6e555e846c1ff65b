"""The forms of an action, and how each becomes a configuration of the table.

| form | tensors |
|---|---|
| `action="knobs"`, the default | `action` [P, G, K]: for each knob the index of its value |
| `action="knobs"`, `action_keys="knobs"` | a key for each knob, its name, [P, G] each |
| `action="configuration"` | `action` [P, G]: the index of a configuration |

The same words choose what `make_actor` draws (`action`, `separate`). Everything behind this module
works with indices of configurations, int64 [P, G].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import ActionIndex, ProfileTable

ACTIONS = ("knobs", "configuration")
"""Kinds of actions: for each knob the index of its value, or the index of a configuration of the
table."""


class ActionForm:
    """One of the forms above, for the actions of a table.

    Args:
        table: the profile.
        action: one of `ACTIONS`.
        action_keys: `action` for one tensor; `knobs` for a key for each knob.
        device: where decisions arrive; None for where the table is.

    Attributes:
        by_knobs: whether actions are indices of knob values.
        keys: the names of the knobs where each has its key, else empty.

    Raises:
        InputError: another word, or `action_keys="knobs"` with `action="configuration"`.
    """

    def __init__(
        self,
        table: ProfileTable,
        action: str = "knobs",
        action_keys: str = "action",
        device: torch.device | str | None = None,
    ) -> None:
        one_of("action_keys", action_keys, ("action", "knobs"))
        one_of("action", action, ACTIONS)
        self.by_knobs = action == "knobs"
        self.keys: list[str] = []
        if action_keys == "knobs":
            one_of("action_keys=knobs: action", action, ["knobs"])
            self.keys = [knob.name for knob in table.knobs]
        self._find = ActionIndex(table.configurations).to(device)
        self.configurations = table.configurations.to(device)
        # how many values there are of each part of an action
        self.sizes = {"the configuration": table.num_configurations}
        if self.by_knobs:
            self.sizes = {f"knob {knob.name}": len(knob.values) for knob in table.knobs}

    def configuration_of(self, action: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the configuration of each action, int64 [P, G], and which actions are none, bool
        [P, G]: combinations of knob values that the table lacks, which get configuration 0. None if
        all are one.

        Raises:
            InputError: an index outside its range.
        """
        configuration = self._find(action) if self.by_knobs else action
        # values that no knob has are found as −1 too, so that most steps need this one number;
        # it takes long to compare tensors with numbers, and amin and aminmax are slower than both
        lowest = int(configuration.min())
        highest = 0 if self.by_knobs else int(configuration.max())
        if lowest >= 0 and highest < len(self.configurations):
            return configuration, None
        self._refuse_outside(action if self.by_knobs else action.unsqueeze(-1))
        return configuration.clamp_min(0), configuration < 0

    def knobs_of(self, action: Tensor) -> Tensor:
        """Return the knob values of actions inside their range, int64 [P, G, K]."""
        return action if self.by_knobs else self.configurations[action]

    def written(self, configuration: Tensor) -> dict[str, Tensor]:
        """Return configurations, int64 [*], as actions of this form, by key."""
        if not self.by_knobs:
            return {"action": configuration}
        knobs = self.configurations[configuration]
        if not self.keys:
            return {"action": knobs}
        return dict(zip(self.keys, knobs.unbind(-1), strict=True))

    def grouped(self, actions: Any, contexts: int, group: int = 1) -> Tensor:
        """Return actions with all axes that decisions have; axes of length 1 may be missing.

        Knobs that have their own keys, [*] each, are put side by side, [*, K].

        Raises:
            InputError: actions of another shape, or that are not whole numbers; or a knob is
                missing.
        """
        try:
            if self.keys:
                if len(self.keys) == 1 and not hasattr(actions, "keys"):
                    # TorchRL's GymWrapper takes a Dict of one apart
                    actions = {self.keys[0]: actions}
                actions = torch.stack([torch.as_tensor(actions[key]) for key in self.keys], -1)
            action = torch.as_tensor(actions)
        except (IndexError, KeyError, RuntimeError, TypeError) as error:
            raise InputError(
                f"action: must be {', '.join(self.sizes)}; names need action_keys='knobs'; {error}"
            ) from error
        shape = [contexts, group]
        if self.by_knobs:
            shape.append(len(self.sizes))
        if action.dtype == torch.long and [*action.shape] == shape:
            return action
        wanted = [size for size in shape if size != 1]
        other = wanted != [*action.squeeze().shape]
        if other or action.dtype == torch.bool or action.is_floating_point():
            raise InputError(
                f"action: is {action.dtype} {[*action.shape]}; must be int64 {wanted}: the index "
                f"of a value of {' and of '.join(self.sizes)}, for each decision"
            )
        # axes of length 1 come back
        return action.long().reshape(shape)

    def _refuse_outside(self, indices: Tensor) -> None:
        """Refuse indices that no value has, int64 [P, G, K], or no configuration, [P, G, 1]."""
        for values, (name, size) in zip(indices.unbind(-1), self.sizes.items(), strict=True):
            outside = values[(values < 0) | (values >= size)].tolist()
            if outside:
                raise InputError(
                    f"action: {name} has no index {outside[0]}; its indices are 0 to {size - 1}"
                )
