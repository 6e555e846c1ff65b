"""The bandit as a vector environment of stable-baselines3, which takes no gymnasium vector
environment. Only this module needs the library."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from knobwise.common.errors import InputError
from knobwise.envs.bandit.gymnasium_vector_env import ConfigBanditVectorEnv, Observation


class StableBaselinesEnv(VecEnv):
    """Decide for many contexts at once under an algorithm of stable-baselines3.

    Spaces, rewards and resets are those of `ConfigBanditVectorEnv`. The info of each environment
    holds the outcome of its decision; `reset_infos` those of the contexts at hand. Under
    `action="configuration"` sb3-contrib's MaskablePPO finds their masks.

    Args:
        env: what `gymnasium.make_vec("knobwise/ConfigBandit-v0", num_envs=…)` returns.

    Raises:
        InputError: another environment, or one that does not reset in the same step.

    Examples:
        >>> import gymnasium
        >>> from stable_baselines3 import PPO
        >>> from knobwise.envs import StableBaselinesEnv
        >>> env = StableBaselinesEnv(gymnasium.make_vec("knobwise/ConfigBandit-v0", num_envs=64))
        >>> model = PPO("MultiInputPolicy", env, n_steps=4, device="cpu").learn(256)
        >>> model.num_timesteps
        256
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        if not isinstance(env, ConfigBanditVectorEnv):
            raise InputError(
                f"env={type(env).__name__}: must be a ConfigBanditVectorEnv, as gymnasium.make_vec "
                "makes it; put wrappers of stable-baselines3 around this one"
            )
        if env.autoreset_mode != AutoresetMode.SAME_STEP:
            raise InputError(
                f"autoreset_mode={env.autoreset_mode.value}: stable-baselines3 resets in the same "
                "step; leave it out"
            )
        self.env = env
        self._masks: NDArray[np.bool_] | None = None
        self._actions: NDArray[Any] | None = None
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self.reset()  # some ask whether there are masks before they reset

    def reset(self) -> Observation:
        """Draw contexts by the seeds of `seed` and the options of `set_options`, which hold
        once."""
        options = {name: [each[name] for each in self._options] for name in self._options[0]}
        seeds = None if set(self._seeds) == {None} else self._seeds
        observations, infos = self.env.reset(seed=seeds, options=options)
        self._reset_seeds()
        self._reset_options()
        self._look_at(infos)
        return observations

    def step_async(self, actions: NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Observation, NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        assert self._actions is not None
        observations, rewards, ended, _, infos = self.env.step(self._actions)
        outcomes = _by_environment(infos["final_info"], besides=observations)
        for outcome, last in zip(outcomes, infos["final_obs"], strict=True):
            outcome["terminal_observation"] = last
            outcome["TimeLimit.truncated"] = False
        self._look_at(infos)
        return observations, rewards, ended, outcomes

    def _look_at(self, infos: dict[str, Any]) -> None:
        """Keep what is known of the contexts at hand."""
        known = {name: infos[name] for name in infos.keys() & {"row", "action_mask"}}
        self.reset_infos = _by_environment(known)
        if "action_mask" in known:
            self._masks = known["action_mask"].astype(bool)

    # -- what algorithms ask each environment for --------------------------------------------------

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the vector environment, which is that of each."""
        if attr_name == "action_masks" and self._masks is not None:
            return [*self._masks[self._chosen(indices)]]
        return [getattr(self.env, attr_name)] * len(self._chosen(indices))

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Return `action_masks` of each environment; there is no other method."""
        if method_name != "action_masks":
            raise AttributeError(f"the environments have no method {method_name} of their own")
        return self.get_attr(method_name, indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"{attr_name}: the environments have no attributes of their own")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * len(self._chosen(indices))

    def _chosen(self, indices: Any) -> list[int]:
        return [*self._get_indices(indices)]

    def close(self) -> None:
        self.env.close()


def _by_environment(infos: dict[str, Any], besides: Any = ()) -> list[dict[str, Any]]:
    """Take infos [n, …] apart into those of each environment, without masks and the keys of
    `besides`."""
    names = [name for name in infos if name[0] != "_" and name not in besides]
    columns = [infos[name].tolist() if infos[name].ndim == 1 else infos[name] for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
