"""The stages of a selector: supervised fine-tuning on beams, RCE, and GRPO on recorded sequences or
on draws of its own."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from knobwise.agents.selector.evaluation import LOWEST, draw
from knobwise.agents.selector.reward_model import RewardModel
from knobwise.agents.training.stage import Stage, Validation
from knobwise.agents.training.trainer import Best
from knobwise.envs.demonstrations.beam_table import bank_rows
from knobwise.losses import GRPOLoss, RCELoss
from knobwise.losses.functional import (
    even_weight,
    expectation,
    group_advantage,
    k3,
    reward_spread,
)
from knobwise.losses.kl_control import temperature_control, weight_control

if TYPE_CHECKING:
    from knobwise.agents.selector.training import SelectorSetup

RCE_TEMPERATURES = 2.0, 0.5
"""τ of RCE at its beginning and its end, in units of the spread of rewards; it falls linearly."""
CURRICULUM_TOP = 3
"""How many sequences of each group are learned from under the curriculum."""
# the keys of the buffer
STORED = (
    "row",
    "action",
    "action_log_prob",
    "reference_log_prob",
    "group_mask",
    ("next", "reward"),
    ("next", "vqa_correct"),
)


class SelectorStage(Stage):
    """A stage of a selector's training; it is a training of its own."""

    stored = STORED

    def __init__(self, setup: SelectorSetup) -> None:
        settings = setup.settings
        super().__init__(setup.agent, settings, iterations=settings.iterations, lr=settings.lr)
        self.setup = setup
        self.reward_spread = setup.reward_spread

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Replay the recorded `sequences` if the environment shows them, or draw."""
        recorded = contexts.get("sequences", None)
        if recorded is None:
            return self.setup.agent(contexts)
        return contexts.set("action", recorded)

    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Compute the means of reward and accuracy over the drawn sequences, and log β beside
        them."""
        mask = present(data)
        drawn = {"Reward": data["next", "reward"][mask]}
        if self.setup.reward_model is None:  # a predicted answer says nothing about the accuracy
            right = data["next", "vqa_correct"]
            drawn["Accuracy"] = right[mask & ~right.isnan()]
        logged = {"Beta": float(self.beta)}
        for name, values in drawn.items():
            if len(values):
                logged[f"{name}_Mean"] = float(values.mean())
                logged[f"{name}_Std"] = float(values.std(correction=0))
        return logged

    @property
    def beta(self) -> Tensor:
        """The weight of GRPO's KL, as its loss has it."""
        return torch.tensor(float(self.setup.loss.of_grpo()["kl_to_ref_coeff"]))

    @abstractmethod
    def validation_loss(self, batch: TensorDictBase) -> Tensor:
        """Return the loss on validation queries whose sequences have been scored, [V]."""

    def validation_advantages(self, batch: TensorDictBase) -> Tensor | None:
        """Return the advantages of all sequences of these queries, [n]; None for a stage that has
        none."""
        return None

    def is_better(self, validation: Validation, best: Best) -> bool:
        """Return True if the present epoch replaces the kept one, as `keep` says."""
        keep = self.setup.config.keep
        if keep == "best_kl":
            # any trained epoch replaces the start, whose KL is 0 where there was no RCE
            return best.iteration < 1 or validation.metrics["KL"] < best.metrics["KL"]
        return keep == "last" or validation.score > best.score


class SFT(SelectorStage):
    """Supervised fine-tuning: all recorded sequences of a group are imitated alike."""

    name = "sft"
    dropout = True

    def __init__(self, setup: SelectorSetup) -> None:
        super().__init__(setup)
        self.imitation = RCELoss(setup.agent, recorded=True, functional=False)

    def prepare(self, share: float, watched: bool) -> None:
        super().prepare(share, watched)
        self.imitation.temperature.fill_(math.inf)
        self.imitation.diagnostics = watched

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Compute −mean ln π of the recorded sequences of each query, averaged over the queries
        that can be learned from."""
        out: TensorDictBase = self.imitation(informative(minibatch))
        return out

    def validation_loss(self, batch: TensorDictBase) -> Tensor:
        self.imitation.temperature.fill_(math.inf)
        loss: Tensor = self.imitation(batch)["loss_rce"]
        return loss


class SequenceRCE(SFT):
    """RCE: recorded sequences are imitated by the softmax of their rewards."""

    name = "rce"
    dropout = False
    temperature: float
    """τ of the present iteration, in units of the spread of rewards."""

    def prepare(self, share: float, watched: bool) -> None:
        super().prepare(share, watched)
        start, end = RCE_TEMPERATURES
        self.temperature = start + (end - start) * share
        self._set(self.temperature)

    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        return super().metrics(data) | {"Temperature": self.temperature}

    def validation_loss(self, batch: TensorDictBase) -> Tensor:
        """Compute the cross-entropy to softmax(reward/τ) at the last τ, so that validations of
        different epochs compare."""
        self._set(RCE_TEMPERATURES[1])
        loss: Tensor = self.imitation(batch)["loss_rce"]
        return loss

    def _set(self, temperature: float) -> None:
        self.imitation.temperature.fill_(temperature * (self.reward_spread or 1.0))


class SequenceGRPO(SelectorStage):
    """GRPO on recorded sequences, or on draws that a scorer or a learned reward scores."""

    name = "grpo"

    def __init__(self, setup: SelectorSetup) -> None:
        super().__init__(setup)
        agent = setup.agent
        loss = setup.loss
        self.grpo = GRPOLoss(agent, **loss.of_grpo(), masked=True, functional=False)
        if loss.kl_band is not None:
            self.kl_controls.append(weight_control(self.grpo.kl_to_ref_coeff, loss.kl_band))
        if loss.temperature_band is not None:
            self.kl_controls.append(temperature_control(agent.temperature, loss.temperature_band))
        self.corrected = dict[str, float]()
        # apart from torch's generators, so that a KL that is only logged changes no draw of the run
        self.kl_draws = torch.Generator(setup.device)

    def prepare(self, share: float, watched: bool) -> None:
        """Set the curriculum; at the beginning of an epoch correct the learned reward."""
        super().prepare(share, watched)
        self.grpo.diagnostics = watched
        self.grpo.top = CURRICULUM_TOP if share < self.setup.loss.curriculum else None
        iteration = round(share * self.iterations)
        # by the iteration, so that a resumed run draws alike
        self.kl_draws.manual_seed(self.setup.seed + iteration)
        epoch, rest = divmod(iteration, self.settings.evaluate_every)
        if self.setup.reward_model is not None and rest == 0:
            self._correct(self.setup.reward_model, epoch)

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Replay or draw, and note the log-probs of policy and reference."""
        setup = self.setup
        contexts = super().collect(contexts)
        if contexts.get("sequences", None) is not None:
            log_prob = setup.agent.get_dist(contexts).log_prob(contexts["action"])
            contexts["action_log_prob"] = log_prob
        # what the KL is taken to, at the temperature of the draws: the KL of equal policies is 0
        setup.reference.temperature.copy_(setup.agent.temperature)
        dist = setup.reference.get_dist(contexts)
        contexts["reference_log_prob"] = dist.log_prob(contexts["action"])
        return contexts

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Compute the loss of `GRPOLoss` over the queries that can be learned from, with rewards in
        units of their spread."""
        loss = self.setup.loss
        if self.reward_spread is None:
            # nothing was recorded that tells: by the draws that it learns from first
            self.reward_spread = spread_of(minibatch["next", "reward"], present(minibatch))
        self.grpo.reward_spread = self.reward_spread
        out: TensorDictBase = self.grpo(
            informative(minibatch, loss.min_positive, loss.positive_above)
        )
        # k3 estimates a KL from draws of the policy alone: neither from records, nor at temperature
        # 1 from draws at another
        recorded = self.setup.env.scorer is None
        if self.watched and (recorded or loss.temperature_band is not None):
            out["kl_to_ref"] = self._kl_of_policy(minibatch)
        return out

    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Add the temperature, and with a scorer the calls of the answering model so far."""
        logged = super().metrics(data)
        if self.setup.env.scorer is not None:
            logged |= {"True_Calls": self.setup.calls} | self.corrected
        return logged | {"Temperature": float(self.setup.agent.temperature)}

    @property
    def beta(self) -> Tensor:
        return self.grpo.kl_to_ref_coeff

    def validation_loss(self, batch: TensorDictBase) -> Tensor:
        """Return −E_π[reward], GRPO's objective without baseline, clip and KL."""
        reward = batch["next", "reward"]
        # draws count alike, recorded sequences by their probability within the group
        preference = torch.zeros_like(reward)
        if batch.get("sequences", None) is not None:
            preference = self.setup.agent.policy(batch).log_prob(batch["action"])
        mask = batch["group_mask"]
        weight = preference.masked_fill(~mask, LOWEST).softmax(-1) * mask
        return -expectation(reward, weight).mean()

    def validation_advantages(self, batch: TensorDictBase) -> Tensor:
        reward = batch["next", "reward"]
        mask = batch["group_mask"]
        advantage = group_advantage(
            reward.masked_fill(~mask, 0.0),
            self.grpo.advantage,
            weight=even_weight(mask),
            clip=self.grpo.advantage_clip,
            unit=self.reward_spread,
            std_floor=self.grpo.advantage_std_floor,
            std_eps=self.grpo.advantage_std_eps,
        )
        return advantage[mask]

    @torch.no_grad()
    def _kl_of_policy(self, minibatch: TensorDictBase) -> Tensor:
        """Estimate the KL to the reference policy over all queries of a minibatch, both at
        temperature 1: k3, over draws of the policy, G for each query."""
        agent = self.setup.agent
        dist = agent.policy(minibatch)
        drawn, log_prob = dist.sample_with_log_prob(agent.group_size, self.kl_draws)
        reference = self.setup.reference.policy(minibatch).log_prob(drawn)
        return k3(log_prob, reference).mean()

    def _correct(self, model: RewardModel, epoch: int) -> None:
        """Spend this epoch's share of the true calls on the policy's draws for training queries.

        The queries come in random order, all of them before any comes again.
        """
        setup = self.setup
        calls = model.config.calls
        epochs = setup.config.epochs
        train = setup.split.train
        # shares differ by one where the calls do not divide evenly
        count = calls * (epoch + 1) // epochs - calls * epoch // epochs
        if not count:
            return
        # all training queries in random order, as often as it takes
        passes = [train[torch.randperm(len(train))] for _ in range(math.ceil(count / len(train)))]
        rows = torch.cat(passes)[:count]
        drawn = draw(setup.agent, rows, setup.loss.group_size)
        demonstrations = bank_rows(setup.table.pool[rows], drawn)
        self.corrected = model.correct(setup.table, rows, demonstrations, setup.answer)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {"calls": self.setup.calls}
        if self.setup.reward_model is not None:
            state["reward_model"] = self.setup.reward_model.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.setup.calls = state["calls"]
        if self.setup.reward_model is not None:
            self.setup.reward_model.load_state_dict(state["reward_model"])


STAGES: dict[str, type[SelectorStage]] = {
    stage.name: stage for stage in (SFT, SequenceRCE, SequenceGRPO)
}


def present(batch: TensorDictBase) -> Tensor:
    """Return which sequences of each group exist, bool [P, G]; all do in live draws."""
    reward = batch["next", "reward"]
    return batch.get("group_mask", torch.ones_like(reward, dtype=torch.bool))


def spread_of(rewards: Tensor, mask: Tensor) -> float:
    """Return how much the rewards of a group typically differ, [n, G]; 1 if none do."""
    return float(reward_spread(rewards, even_weight(mask))) or 1.0


def informative(
    minibatch: TensorDictBase, min_positive: float = 0.0, positive_above: float | None = None
) -> TensorDictBase:
    """Return the queries of a minibatch that a policy can learn from, or all if there are none.

    Nothing can be learned from a query that has no sequences, or if less than a share
    `min_positive` of them is positive: has a reward above `positive_above`, or if that is None a
    right answer.
    """
    mask = present(minibatch)
    if min_positive > 0:
        if positive_above is None:
            positive = minibatch["next", "vqa_correct"] > 0.5
        else:
            positive = minibatch["next", "reward"] > positive_above
        count = (positive & mask).sum(-1, keepdim=True)
        mask = mask & (count >= min_positive * mask.sum(-1, keepdim=True))
    minibatch = minibatch.copy().set("group_mask", mask)
    informs = mask.any(-1)
    if informs.any():
        return minibatch[informs]
    return minibatch
