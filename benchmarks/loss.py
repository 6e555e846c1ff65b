"""GRPOLoss beside the same formula as a bare function, forward and backward.

A batch is 128 contexts × 6 networks of the built-in controller, with 16 draws each, or with every
configuration.

    python benchmarks/loss.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from tensordict import TensorDict
from timing import Bench, Way
from torch import Tensor

from knobwise.agents.controller.actor import make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.envs import ConfigBandit, builtin_profile
from knobwise.losses import ExactGRPOLoss, GRPOLoss

TABLE = builtin_profile()
BETA = 0.1
EPSILON = 0.2
CONTEXTS = 128 * 6
GROUP_SIZE = 16


def surrogate(log_prob: Tensor, old: Tensor, known: Tensor, advantage: Tensor) -> Tensor:
    """Return the loss of each action, the KL to the reference included, [*] each."""
    ratio = (log_prob - old).exp()
    cut = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    log_ratio = known - log_prob
    kl = log_ratio.exp() - 1 - log_ratio
    return BETA * kl - torch.minimum(ratio * advantage, cut * advantage)


def grpo_loss(log_prob: Tensor, old: Tensor, known: Tensor, reward: Tensor) -> Tensor:
    """Return GRPO's loss over draws, [*, G] each."""
    advantage = reward - reward.mean(-1, keepdim=True)
    return surrogate(log_prob, old, known, advantage).mean()


def sampled(network: Callable[[], Tensor], batch: TensorDict) -> Tensor:
    """Return GRPO's loss over draws."""
    return grpo_loss(
        network().gather(-1, batch["configuration"]),
        old=batch["action_log_prob"],
        known=batch["reference_log_prob"],
        reward=batch["next", "reward"],
    )


def exact(network: Callable[[], Tensor], batch: TensorDict) -> Tensor:
    """Return GRPO's loss in expectation over every configuration."""
    reward = batch["reward_per_configuration"]
    old = batch["behaviour_log_probs"]
    weight = old.exp()
    advantage = reward - (weight * reward).sum(-1, keepdim=True)
    loss = surrogate(network(), old, batch["reference_log_probs"], advantage)
    return (weight * loss).sum(-1).mean()


def batch_of(controller: Controller) -> TensorDict:
    """Return contexts with drawn actions, all that either objective reads."""
    env = ConfigBandit(
        TABLE,
        batch_size=CONTEXTS,
        group_size=GROUP_SIZE,
        reward="utility",
        observe_features=False,
        seed=0,
    )
    actor = make_actor(controller, TABLE, GROUP_SIZE)
    with torch.no_grad():
        contexts = env.reset()
        dist = actor.get_dist(contexts)
        contexts["configuration"] = dist.sample_index()
        contexts["action"] = controller.configurations[contexts["configuration"]]
        contexts = env.step(contexts)
        contexts["behaviour_log_probs"] = dist.log_probs
        # a reference somewhere else
        contexts["reference_log_probs"] = (1.1 * dist.log_probs).log_softmax(-1)
        for policy, log_prob in (("behaviour", "action"), ("reference", "reference")):
            drawn = contexts[f"{policy}_log_probs"].gather(-1, contexts["configuration"])
            contexts[f"{log_prob}_log_prob"] = drawn
    rewards = env.rewards.all(contexts["row"], contexts["budget_ms"])
    contexts["reward_per_configuration"] = rewards
    return contexts


def learn(loss: Callable[[], Tensor], controller: Controller) -> None:
    """Compute a loss and its gradient."""
    controller.zero_grad()
    loss().backward()


def gradient(loss: Callable[[], Tensor], controller: Controller) -> Tensor:
    """Return the gradient of a loss, flattened."""
    learn(loss, controller)
    return torch.cat([p.grad.flatten() for p in controller.parameters() if p.grad is not None])


def loss_of(module: GRPOLoss, batch: TensorDict) -> Tensor:
    """Return the loss that the module computes."""
    out = module(batch)
    return out["loss_objective"] + out["loss_kl_to_ref"]


def bare_way(
    bare: Callable[[], Tensor], ours: Callable[[], Tensor], controller: Controller
) -> dict[str, Way]:
    """Return the bare function, whose gradient must be that of our loss."""
    torch.testing.assert_close(gradient(ours, controller), gradient(bare, controller))
    return {"a bare function": functools.partial(learn, bare, controller)}


def main() -> None:
    """Time both objectives."""
    bench = Bench()
    torch.manual_seed(0)
    rows = torch.arange(TABLE.num_samples)
    controller = Controller.for_table(TABLE, rows, PolicyConfig(hidden=64)).eval()
    batch = batch_of(controller)
    x = controller.normaliser(TABLE.features, TABLE.num_samples)[batch["row"]]
    network = functools.partial(controller, x, batch["budget_ms"])
    actor = make_actor(controller, TABLE, GROUP_SIZE)
    for loss, function in ((GRPOLoss, sampled), (ExactGRPOLoss, exact)):
        module = loss(
            actor,
            functional=False,
            kl_to_ref_coeff=BETA,
            clip_epsilon=EPSILON,
            advantage="centred",
        )
        module.diagnostics = False
        ours = functools.partial(loss_of, module, batch)
        bare = functools.partial(function, network, batch)
        bench.line(
            f"{loss.__name__}, forward and backward",
            "ms",
            functools.partial(learn, ours, controller),
            functools.partial(bare_way, bare, ours, controller),
            target="≤ 1.3 × a bare function",
        )


if __name__ == "__main__":
    main()
