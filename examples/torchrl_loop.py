"""Warm-up and GRPO with TorchRL's parts and nothing hidden: environment, policy, losses, collector,
buffer, optimiser.

Each knob is drawn under its own key. What is judged is what would be deployed: features and a
budget in, a configuration out. The ratio of GRPO is 1 in the first minibatch of an iteration, and
moves in the second. Prints the utility on held-out samples. It takes about a
minute on one core.
"""

import copy

import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement

from knobwise.agents import Controller, DeployedController, PolicyConfig, make_actor
from knobwise.agents.evaluation.evaluation import evaluate_policy
from knobwise.envs import ConfigBandit, default_budgets
from knobwise.losses import GRPOLoss, RCELoss, dropping_out
from knobwise.testbeds import builtin_profile


def main(
    warm_up: int = 600, iterations: int = 300, contexts: int = 256, group_size: int = 16
) -> float:
    """Train a controller and return its utility on the test split."""
    table = builtin_profile()
    split = table.split()
    budgets_ms = default_budgets(table)
    best = -1.0
    weights = {}

    shape = {"batch_size": contexts, "group_size": group_size}
    observed = {"observe_features": False, "full_information": True}
    env = ConfigBandit(table, **shape, **observed, rows=split.train, action_keys="knobs")
    agent = DeployedController(Controller.for_table(table, split.train, PolicyConfig()))
    policy = make_actor(agent, table, group_size=group_size, separate=True)
    storage = LazyTensorStorage(contexts)
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=contexts // 2)
    stages = (
        (RCELoss(policy), warm_up, 2e-3),
        (GRPOLoss(policy), iterations, 1e-3),
    )
    for loss_module, count, lr in stages:
        warming_up = isinstance(loss_module, RCELoss)
        optimiser = torch.optim.AdamW(loss_module.parameters(), lr=lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, count)
        frames = {"frames_per_batch": contexts, "total_frames": contexts * count}
        # no recurrent state, so no transforms of the policy
        collector = Collector(env, policy, **frames, auto_register_policy_transforms=False)
        for iteration, batch in enumerate(collector):
            if warming_up:
                loss_module.temperature.fill_(0.5 - 0.4 * iteration / count)
            buffer.extend(batch.flatten())  # [contexts, 1 step] → [contexts]
            for _ in range(2):
                with dropping_out(warming_up):  # not in GRPO, whose ratio begins at 1
                    losses = loss_module(buffer.sample())
                optimiser.zero_grad()
                sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimiser.step()
            schedule.step()
            if iteration % 20 == 0:
                judged = evaluate_policy(agent, table, split.validation, budgets_ms)
                if (score := float(judged.utility.mean())) > best:
                    best = score
                    weights = copy.deepcopy(agent.state_dict())
        print(f"validation utility after {type(loss_module).__name__}: {best:.3f}", flush=True)
    agent.load_state_dict(weights)
    return float(evaluate_policy(agent, table, split.test, budgets_ms).utility.mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"test utility {main():.3f}")
