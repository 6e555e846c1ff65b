"""Time the environments, beside raw indexing of tensors and a plain gymnasium environment.

Raw indexing reads the table alone: it finds the configuration of each action, draws one of its
measurements, and rewards it. All replay the built-in profile under the reward `utility`.

    python benchmarks/environment.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from timing import Bench, Way
from torch import Tensor

from knobwise.envs import (
    ConfigBandit,
    ConfigBanditEnv,
    ConfigBanditVectorEnv,
    RewardConfig,
    builtin_profile,
)

TABLE = builtin_profile()
DRAWN = hasattr(TABLE, "repeats_ms")
"""False in early versions, which `compare.py` may time: they replay median latencies alone."""


def step(env: Any, contexts: Any) -> None:
    """Step an environment, and remove the outcome from the contexts."""
    env.step(contexts)
    del contexts["next"]


def indexing(contexts: Any, actions: Tensor, repeats: str) -> Callable[[], Tensor]:
    """Return a function that rewards actions, int64 [P, G, K], by indexing alone."""
    rows = contexts["row"]
    budgets_ms = contexts["budget_ms"].unsqueeze(-1)
    sizes = torch.tensor([len(knob.values) for knob in TABLE.knobs])
    strides = sizes.flip(0).cumprod(0).flip(0) // sizes
    by_code = torch.full((int(sizes.prod()),), -1)
    by_code[(TABLE.configurations * strides).sum(1)] = torch.arange(len(TABLE.configurations))
    accuracy = TABLE.accuracy.flatten()
    latency_ms = TABLE.latency_ms.flatten()
    measured_ms = TABLE.measurements_ms.flatten()
    measurements = TABLE.measurements_ms.shape[-1]

    def reward() -> Tensor:
        code = actions[..., 0] * strides[0]
        for knob in range(1, len(sizes)):
            code = code + actions[..., knob] * strides[knob]
        cells = rows.unsqueeze(-1) * len(TABLE.configurations) + by_code.take(code)
        if repeats == "draw":
            which = torch.randint(measurements, cells.shape)
            took_ms = measured_ms.take(cells * measurements + which)
        else:
            took_ms = latency_ms.take(cells)
        return torch.where(took_ms <= budgets_ms, accuracy.take(cells), 0.0)

    return reward


class PlainEnv(gymnasium.Env[Any, Any]):
    """A profile as a gymnasium environment, with only what an agent needs."""

    def __init__(self) -> None:
        self.features = {name: block.numpy() for name, block in TABLE.features.items()}
        self.accuracy = TABLE.accuracy.numpy()
        self.measured_ms = TABLE.measurements_ms.numpy()
        self.configurations = TABLE.configurations.numpy()
        self.budgets_ms = np.quantile(TABLE.latency_ms.numpy(), np.linspace(0.03, 0.97, 1025))
        self.action_space = spaces.MultiDiscrete([len(knob.values) for knob in TABLE.knobs])
        boxes: dict[str, Any] = {}
        for name, block in self.features.items():
            boxes[name] = spaces.Box(float(block.min()), float(block.max()), block.shape[1:])
        boxes["budget_ms"] = spaces.Box(0.0, float(self.budgets_ms[-1]), (1,))
        self.observation_space = spaces.Dict(boxes)

    def _observe(self) -> dict[str, Any]:
        observation = {name: block[self.row].copy() for name, block in self.features.items()}
        return observation | {"budget_ms": np.array([self.budget_ms], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.row = int(self.np_random.integers(len(self.accuracy)))
        self.budget_ms = float(self.np_random.choice(self.budgets_ms))
        return self._observe(), {"row": self.row}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        configuration = int((self.configurations == action).all(1).nonzero()[0][0])
        took_ms = self.np_random.choice(self.measured_ms[self.row, configuration])
        accuracy = float(self.accuracy[self.row, configuration])
        reward = accuracy if took_ms <= self.budget_ms else 0.0
        info = {"accuracy": accuracy, "latency_ms": took_ms}
        return self._observe(), reward, True, False, info


def episode(env: gymnasium.Env[Any, Any], action: Any) -> None:
    """Reset an environment and make a decision."""
    env.reset()
    env.step(action)


def time_steps(
    bench: Bench, contexts: int, group_size: int | None, repeats: str, observed: bool = False
) -> None:
    """Time steps of many contexts: one draw for each, or a group of draws.

    Where features are observed, an outcome has those of its contexts, which nobody changes.
    Without drawn measurements (`repeats="median"`), raw indexing must give the same rewards.
    """
    options: dict[str, Any] = {"repeats": repeats} if DRAWN else {}
    # under this reward a late answer costs nothing
    env = ConfigBandit(
        TABLE,
        batch_size=contexts,
        group_size=group_size,
        reward=RewardConfig(kind="utility"),
        observe_features=observed,
        seed=0,
        **options,
    )
    drawn = env.rand_action(env.reset())
    actions = drawn["action"].reshape(contexts, group_size or 1, -1)

    def peers() -> dict[str, Way]:
        raw = indexing(drawn, actions, repeats)
        if repeats == "median":
            rewards = env.step(drawn)["next", "reward"].view(actions.shape[:2])
            torch.testing.assert_close(raw(), rewards)
        return {"raw indexing": raw}

    size = f"{contexts:,}" if group_size is None else f"{contexts:,} × {group_size}"
    bench.line(
        f"ConfigBandit.step, {size}, {repeats}" + ", features observed" * observed,
        "ns a draw",
        functools.partial(step, env, drawn),
        peers,
        per=actions[..., 0].numel(),
        target="≤ 20 ns",
    )


def time_vector(bench: Bench, size: int) -> None:
    """Time a vector of environments. A small one is compared with gymnasium's own vector."""
    vector = ConfigBanditVectorEnv(size, TABLE)
    vector.reset(seed=0)
    actions = vector.action_space.sample()

    def peers() -> dict[str, Way]:
        if size > 100:
            return {}
        plain = SyncVectorEnv([PlainEnv] * size, autoreset_mode=AutoresetMode.SAME_STEP)
        plain.reset(seed=0)
        return {"SyncVectorEnv of plain environments": functools.partial(plain.step, actions)}

    bench.line(
        f"gymnasium vector environment, {size:,}",
        "µs a decision",
        functools.partial(vector.step, actions),
        peers,
        per=size,
        target="≤ 1.67 µs" if size > 1000 else "",
    )


def time_single(bench: Bench) -> None:
    """Time a single environment."""
    env = ConfigBanditEnv(TABLE)
    action = env.action_space.sample()
    bench.line(
        "gymnasium environment, reset and step",
        "µs",
        functools.partial(episode, env, action),
        lambda: {"a plain environment": functools.partial(episode, PlainEnv(), action)},
        target="≤ 200 µs",
    )


if __name__ == "__main__":
    BENCH = Bench()
    time_steps(BENCH, 16_384, None, "median")
    time_steps(BENCH, 2_048, 8, "median")
    if DRAWN:
        time_steps(BENCH, 16_384, None, "draw")
        time_steps(BENCH, 16_384, None, "draw", observed=True)
        time_steps(BENCH, 2_048, 8, "draw", observed=True)
    time_vector(BENCH, 4096)
    time_vector(BENCH, 64)
    time_single(BENCH)
