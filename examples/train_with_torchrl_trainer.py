"""GRPO inside `torchrl.trainers.Trainer`, which brings the loop, logging and checkpoints.

Prints the utility on held-out samples before and after.
"""

import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.trainers import DefaultOptimizationStepper, ReplayBufferTrainer, Trainer

from knobwise.agents import (
    Controller,
    DeployedController,
    PolicyConfig,
    evaluate_policy,
    make_actor,
)
from knobwise.envs import ConfigBandit, default_budgets
from knobwise.losses import GRPOLoss
from knobwise.testbeds import builtin_profile


def main(iterations: int = 300, contexts: int = 256, group_size: int = 16) -> tuple[float, float]:
    """Train a controller; return its utility on the test split before and after."""
    table = builtin_profile()
    split = table.split()
    budgets_ms = default_budgets(table)
    env = ConfigBandit(
        table, batch_size=contexts, group_size=group_size, rows=split.train, observe_features=False
    )
    controller = Controller.for_table(table, split.train, PolicyConfig())
    policy = make_actor(controller, table, group_size=group_size)
    loss_module = GRPOLoss(policy)

    frames = contexts * iterations
    trainer = Trainer(
        collector=Collector(
            env,
            policy,
            frames_per_batch=contexts,
            total_frames=frames,
            auto_register_policy_transforms=False,
        ),
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss_module,
        optimizer=torch.optim.AdamW(loss_module.parameters(), lr=2e-3, weight_decay=0.01),
        optimization_stepper=DefaultOptimizationStepper(),
        clip_norm=1.0,
        progress_bar=False,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(contexts),
        sampler=SamplerWithoutReplacement(),
        batch_size=contexts // 2,
    )
    minibatches = ReplayBufferTrainer(buffer, flatten_tensordicts=True)
    trainer.register_op("batch_process", minibatches.extend)
    trainer.register_op("process_optim_batch", minibatches.sample)

    test = table, split.test, budgets_ms
    before = evaluate_policy(DeployedController(controller), *test).utility.mean()
    trainer.train()
    after = evaluate_policy(DeployedController(controller), *test).utility.mean()
    return float(before), float(after)


if __name__ == "__main__":
    torch.manual_seed(0)
    before, after = main()
    print(f"test utility {before:.3f} before, {after:.3f} after")
