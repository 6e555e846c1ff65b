"""A loss of your own: `loss=examples.losses:CISPOLoss`.

knobwise train loss=examples.losses:CISPOLoss loss.settings='{most: 2}' name=cispo

`knobwise.losses.own` says what a class must be, and what its module is called with.
"""

from tensordict import TensorDict, TensorDictBase
from torchrl.objectives import LossModule

from knobwise.agents.controller.actor import Actor
from knobwise.losses import group_advantage


class CISPOLoss(LossModule):
    """Cut the weight of a draw instead of its gradient, so that every draw teaches (CISPO, MiniMax
    2025, "MiniMax-M1"): −E[stop(min(ρ, most)) · A · ln π], with ρ = π/π_old.

    Args:
        most: the largest weight of a draw.
        advantage: that of `loss.advantage`.
    """

    def __init__(self, actor: Actor, *, most: float = 1.2, advantage: str = "centred") -> None:
        super().__init__()
        self.actor = actor
        self.most = most
        self.advantage = advantage

    def forward(self, contexts: TensorDictBase) -> TensorDict:
        policy = self.actor.get_dist(contexts)
        log_prob = policy.log_prob_of_index(contexts["configuration"])  # [*, G]
        rewards = contexts["next", "reward"]
        advantage = group_advantage(rewards, self.advantage, unit=self.reward_spread)
        ratio = (log_prob.detach() - contexts["action_log_prob"]).exp()
        loss = -(ratio.clamp_max(self.most) * advantage * log_prob).mean()
        return TensorDict({"loss_objective": loss, "ratio_mean": ratio.mean()})
