"""The same queue as a gymnasium environment: one trace, request by request, to be stepped by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.service.torchrl_env import ServiceQueue
from knobwise.envs.tables.profile_table import ProfileTable

Observation = dict[str, NDArray[Any]]
OBSERVED = ("left_ms", "backlog", "load")


class ServiceQueueEnv(gymnasium.Env[Observation, Any]):
    """Serve one request after the other: set the price of a millisecond, and see who is late for it.

    Description:
        Requests arrive, wait for one another and have deadlines from arrival; the outcomes were measured, no model
        runs. The configuration of a request is the one with the best expected utility under the time left − price ·
        expected latency. See `ServiceQueue`, of which this is one trace and one rollout.
    Action space:
        `Discrete(K)`: the index of a price in `env.unwrapped.prices`, float [K], in utility per ms; the first is 0.
    Observation space:
        `Dict` of `left_ms`, what waiting left of the deadline, `backlog`, how many wait behind, `load`, the recent load
        (1 is what the servers can serve), and `utility` and `latency_ms`, both [C], what is expected of each
        configuration under the time left (0 where it was not profiled).
    Rewards:
        The accuracy if the answer came before the deadline, else 0.
    Starting state:
        The first request of a new trace.
    Episode end:
        With the last request.
    Info:
        `row`, `sample_id`; after a step `accuracy` and `latency_ms` of the request that was served.
    Arguments:
        table: the profile; None for the built-in one. render_mode: None or "ansi" (words). The others as
        `ServiceQueue` takes them.

    Raises InputError for settings and actions that do not exist.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}

    def __init__(self, table: ProfileTable | None = None, render_mode: str | None = None, **settings: Any) -> None:
        if render_mode is not None:
            one_of("render_mode", render_mode, self.metadata["render_modes"])
        if table is None:
            from knobwise.envs.readers.builtin import builtin_profile

            table = builtin_profile()
        if unknown := settings.keys() & {"batch_size", "group_size"}:
            raise InputError(f"{', '.join(sorted(unknown))}: this environment is one trace; ServiceQueue has many")
        self._env, self.render_mode = ServiceQueue(table, **settings), render_mode
        self.table, self.prices = table, self._env.prices.numpy()
        shape, most = (table.num_configurations,), float(np.finfo(np.float32).max)
        self.action_space = spaces.Discrete(len(self.prices))
        boxes: dict[str, spaces.Space[Any]] = {name: spaces.Box(-most, most, ()) for name in OBSERVED}
        self.observation_space: Any = spaces.Dict(
            boxes | {"utility": spaces.Box(0, 1, shape), "latency_ms": spaces.Box(0, most, shape)}
        )
        self._state: TensorDict | None = None
        self._words = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a new trace."""
        super().reset(seed=seed)
        if options:
            raise InputError(f"reset options: {', '.join(options)}: a trace has none")
        if seed is not None:
            self._env.set_seed(seed)
        return self._observed(self._env.reset())

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Serve the request at this price; the next one is observed."""
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        index = self._env.action_spec.zero() + int(action)
        after = self._env.step(self._state.set("action", index))["next"]
        served = {name: after[name].item() for name in ("accuracy", "latency_ms")}
        reward, over = after["reward"].item(), bool(after["done"].item())
        observation, info = self._observed(after)
        price = f"at {self.prices[int(action)]:.3f} per ms: accuracy {served['accuracy']:.2f}"
        self._words = f"{price}, {served['latency_ms']:.2f} ms, utility {reward:.2f}\n{self._words}"
        self._state = None if over else self._state
        return observation, reward, over, False, info | served

    def render(self) -> Any:
        """The outcome of the last step and the request that waits for a price, in words."""
        return None if self.render_mode is None else self._words

    def _observed(self, state: Any) -> tuple[Observation, dict[str, Any]]:
        self._state, row = state, int(state["row"].item())
        rows, left = state["row"].flatten(), state["left_ms"]
        meets = self._env.forecast.meets(rows, left)[0, 0]
        utility = (self._env.forecast.accuracy[row].clamp(0, 1) * meets).nan_to_num(0.0).numpy()
        observation = {name: state[name].numpy().reshape(()).copy() for name in OBSERVED}
        observation |= {
            "utility": utility,
            "latency_ms": self._env.forecast.latency_ms(rows)[0].nan_to_num(0.0).numpy(),
        }
        sample = self.table.sample_ids[row]
        self._words = f"Sample {sample}: {left.item():.2f} ms left, {int(state['backlog'].item())} wait behind"
        return observation, {"row": row, "sample_id": sample}
