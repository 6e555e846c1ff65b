"""PPO by TorchRL's parts alone: three heads of one's own, one for each knob under its own key, a
value network, GAE, ClipPPOLoss.

Prints the mean reward on held-out samples before and after; about a minute on one core.
`knobwise train -m experiment=ppo` compares PPO with GRPO.
"""

import torch
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from knobwise.envs import ConfigBandit
from knobwise.testbeds import builtin_profile


class Network(MLP):
    """Budget [P] and feature blocks [P, d] in, float [P, out_features] out."""

    def forward(self, budget_ms: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        return super().forward(budget_ms.log().unsqueeze(-1), *features)


class Heads(torch.nn.Module):
    """The same in, logits [P, values] of each knob out."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.body = Network(out_features=256, num_cells=[256], activate_last_layer=True)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(256, size) for size in sizes)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(*inputs)
        return tuple(head(hidden) for head in self.heads)


def main(iterations: int = 200, contexts: int = 2048) -> tuple[float, float]:
    """Train a policy and return its mean reward on the test split before and after."""
    table = builtin_profile()
    shape = {"batch_size": contexts, "action_keys": "knobs"}
    env, _, held_out = (ConfigBandit(table, rows=rows, **shape) for rows in table.split())
    read = ["budget_ms", *table.features]
    knobs = [knob.name for knob in table.knobs]  # max_crops, top_k, num_active_blocks
    # logits of each knob → a draw and a log-prob of each, under keys of its own
    logits = [("params", knob, "logits") for knob in knobs]
    heads = TensorDictModule(Heads(table.knob_sizes), in_keys=read, out_keys=logits)
    kinds = {"distribution_map": dict.fromkeys(knobs, Categorical)}
    drawn = {"distribution_class": CompositeDistribution, "distribution_kwargs": kinds}
    actor = ProbabilisticActor(heads, ["params"], knobs, return_log_prob=True, **drawn)
    critic = TensorDictModule(Network(out_features=1, num_cells=[256, 256]), read, ["state_value"])
    critic(actor(env.reset()))  # sets the widths of the first layers
    estimate = GAE(gamma=1.0, lmbda=1.0, value_network=critic)  # of one step: reward − V
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
    loss_module.set_keys(action=knobs, sample_log_prob=[f"{knob}_log_prob" for knob in knobs])
    optimiser = torch.optim.AdamW(loss_module.parameters(), lr=3e-4)
    parts = {"storage": LazyTensorStorage(contexts), "sampler": SamplerWithoutReplacement()}
    buffer = ReplayBuffer(batch_size=contexts // 4, **parts)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        before = held_out.rollout(1, actor)["next", "reward"].mean()
    options = {"total_frames": contexts * iterations, "auto_register_policy_transforms": False}
    for batch in Collector(env, actor, frames_per_batch=contexts, **options):
        buffer.extend(estimate(batch).flatten())
        for _ in range(8):  # two passes
            losses = loss_module(buffer.sample())
            optimiser.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimiser.step()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        return float(before), float(held_out.rollout(1, actor)["next", "reward"].mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    print("reward {:.3f} before, {:.3f} after".format(*main()))
