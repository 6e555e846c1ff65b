"""The contextual bandit that replays a profile, as a native batched TorchRL environment: every episode is one decision.

The group is an axis of the action, so one forward pass of a policy serves all its draws, and observations hold row
numbers only: features are looked up where they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, Unbounded

from knobwise.envs.configurations.contexts import ContextSampler, limit_key
from knobwise.envs.configurations.replay import Replay
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.single_step import SingleStepEnv
from knobwise.envs.tables.profile_table import ProfileTable


class ConfigBandit(SingleStepEnv):
    """P contexts at once, G configurations for each.

    Observation: `row` int64 [P] (row of the table), `budget_ms` float32 [P], or under a mean budget `worth_ms`; with
    `lean=True`, as in the training loop, nothing else. Otherwise also the feature blocks [P, d], `mask` bool [P, C]
    (the configurations profiled for the sample), and `accuracy` and `latency_ms` float32 [P, G] of the actions, 0
    before the step. With `full_information=True` also `reward_per_configuration` float32 [P, C], NaN if not profiled.

    Action: `action` int64 [P, G, K], for each knob the index of its value. Reward: float32 [P, G].

    Args:
        batch_size, group_size: P, G.
        rows: int64 [n], the samples to draw from (the training split); None for all. From M such lists contexts are
            drawn in turn, context i from list i mod M.
        weights: float [N], how often each row is drawn relative to the others; None for evenly.

    Raises:
        InputError: by `step`, if an action was never profiled for its sample.

    Examples:
        >>> from knobwise.envs import ConfigBandit, builtin_profile
        >>> env = ConfigBandit(builtin_profile(), batch_size=4, group_size=2, seed=0)
        >>> env.rollout(1)["next", "reward"].shape
        torch.Size([4, 1, 2])
    """

    def __init__(
        self,
        table: ProfileTable,
        *,
        batch_size: int = 1,
        group_size: int = 1,
        budget: BudgetConfig | None = None,
        reward: RewardConfig | str | None = None,
        rows: Tensor | Sequence[Tensor] | None = None,
        seed: int | None = None,
        unprofiled: str = "nearest",
        lean: bool = False,
        full_information: bool = False,
        weights: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=[batch_size])
        self.table, self.lean, self.full_information = table, lean, full_information
        self.limit_key = limit_key(budget)
        self.replay = Replay(table, budget, reward, unprofiled, device=device)
        self.rewards = self.replay.rewards
        self.contexts = ContextSampler(table, budget or BudgetConfig(), rows, seed, weights)
        p, g, c = batch_size, group_size, table.num_configurations
        observation: dict[str, Unbounded | Binary | Categorical] = {
            "row": Categorical(table.num_samples, shape=(p,), dtype=torch.int64, device=device),
            self.limit_key: Unbounded(shape=(p,), device=device),
        }
        if full_information:
            observation["reward_per_configuration"] = Unbounded(shape=(p, c), device=device)
        if not lean:
            for name, block in table.features.items():
                observation[name] = Unbounded(shape=(p, block.shape[1]), device=device)
            observation["mask"] = Binary(shape=(p, c), dtype=torch.bool, device=device)
            observation["accuracy"] = Unbounded(shape=(p, g), device=device)
            observation["latency_ms"] = Unbounded(shape=(p, g), device=device)
        self.observation_spec = Composite(observation, shape=(p,), device=device)
        sizes = torch.tensor(table.knob_sizes)
        self.action_spec = MultiCategorical(
            sizes, shape=(p, g, len(sizes)), dtype=torch.int64, remove_singleton=False, device=device
        )
        self._set_outcome_specs(p, g)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        # contexts are drawn where the table is, so that a seed gives the same ones on every device
        rows, budgets_ms = self.contexts(self.batch_size.numel())
        out = {"row": rows.to(self.device), self.limit_key: budgets_ms.to(self.device)}
        if self.full_information:
            out["reward_per_configuration"] = self.rewards.all(out["row"], out[self.limit_key])
        if not self.lean:
            blocks = {**self.table.features, "mask": self.table.mask}
            out |= {name: block[rows].to(self.device) for name, block in blocks.items()}
            out |= {name: self.observation_spec[name].zero() for name in ("accuracy", "latency_ms")}
        return self._context(out)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = tensordict["row"]
        replayed = self.replay(rows, tensordict["action"], tensordict[self.limit_key])
        observed = {}
        if not self.lean:
            observed["accuracy"], observed["latency_ms"] = self.replay.outcome(rows, replayed)
        return self._outcome(tensordict, replayed.reward, observed)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Draw uniformly among the configurations profiled for each sample."""
        if tensordict is None or "row" not in tensordict:
            return super().rand_action(tensordict)
        # configuration n + 1 of those profiled for the sample, n drawn evenly: much faster than torch.multinomial
        counts = self.table.mask[tensordict["row"].cpu()].cumsum(1, dtype=torch.int32)
        drawn = torch.searchsorted(counts, (torch.rand(len(counts), self.group_size) * counts[:, -1:]).int() + 1)
        return tensordict.set("action", self.table.configurations[drawn].to(tensordict["row"].device))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.contexts.generator.manual_seed(seed)
