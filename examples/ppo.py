"""PPO with a value network by TorchRL's parts alone: policy, value network, GAE, ClipPPOLoss.

Prints the mean reward on held-out samples before and after; about a minute on one core.
`knobwise train -m experiment=ppo` compares PPO with GRPO.
"""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from knobwise.envs import ConfigBandit, builtin_profile


class Network(MLP):
    """Budget [P] and feature blocks [P, d] in, float [P, out_features] out."""

    def forward(self, budget_ms: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        return super().forward(budget_ms.log().unsqueeze(-1), *features)


def main(iterations: int = 200, contexts: int = 2048) -> tuple[float, float]:
    """Train a policy and return its mean reward on the test split before and after."""
    table = builtin_profile()
    shape = {"batch_size": contexts, "action": "configuration"}
    env, _, held_out = (ConfigBandit(table, rows=rows, **shape) for rows in table.split())
    read = ["budget_ms", *table.features]
    network = Network(out_features=table.num_configurations, num_cells=[256, 256])
    logits = TensorDictModule(network, in_keys=read, out_keys=["logits"])
    drawn = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
    actor = ProbabilisticActor(logits, in_keys=["logits"], spec=env.action_spec, **drawn)
    value = Network(out_features=1, num_cells=[256, 256])
    critic = TensorDictModule(value, in_keys=read, out_keys=["state_value"])
    critic(actor(env.reset()))  # sets the widths of the first layers
    estimate = GAE(gamma=1.0, lmbda=1.0, value_network=critic)  # of one step: reward − V
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
    optimiser = torch.optim.AdamW(loss_module.parameters(), lr=3e-4)
    parts = {"storage": LazyTensorStorage(contexts), "sampler": SamplerWithoutReplacement()}
    buffer = ReplayBuffer(batch_size=contexts // 4, **parts)
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        before = held_out.rollout(1, actor)["next", "reward"].mean()
    frames = {"frames_per_batch": contexts, "total_frames": contexts * iterations}
    for batch in Collector(env, actor, **frames, auto_register_policy_transforms=False):
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
