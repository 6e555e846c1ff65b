"""The state of contexts in what TorchRL's collectors and trainers save."""

from __future__ import annotations

from typing import Any

from torchrl.envs import ParallelEnv, TransformedEnv
from torchrl.envs.transforms import Transform


class ContextState(Transform):
    """Makes a collector save where the draws of contexts are, and go on from there.

    TorchRL saves the transforms of an environment, and the environment itself only where it is a
    `SerialEnv` or `ParallelEnv` without transforms. This one changes nothing, and saves the
    environment that it is around: a bandit, or workers that are bandits.

    The contexts of the next reset come back. A collector that decides for contexts it already drew
    when it was made does so first, unless it has `reset_at_each_iter=True`.

    Examples:
        >>> from torchrl.envs import ParallelEnv, TransformedEnv
        >>> from knobwise.envs import ConfigBandit, ContextState
        >>> from knobwise.testbeds import builtin_profile
        >>> table = builtin_profile()
        >>> env, other = (TransformedEnv(ConfigBandit(table), ContextState()) for _ in range(2))
        >>> other.load_state_dict(env.state_dict())
        >>> bool(env.reset()["row"] == other.reset()["row"])
        True
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self._bandit().state_dict())

    def set_extra_state(self, state: dict[str, Any]) -> None:
        env = self._bandit()
        env.load_state_dict(state)
        if isinstance(env, ParallelEnv) and env._use_buffers:
            # TorchRL 0.14.1 would take that the workers have loaded for the end of the next reset,
            # and return what they have not written yet
            env._wait_for_workers(range(env.num_workers))

    def _bandit(self) -> Any:
        env = self.parent
        while isinstance(env, TransformedEnv):
            env = env.base_env
        if env is None:
            raise RuntimeError("ContextState: is in no environment yet")
        return env
