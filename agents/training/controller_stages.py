"""The stages of a controller that learns from rewards: RCE, then GRPO or PPO.

The stages of a teacher, and of imitating it, are in `knobwise.agents.teacher.stages`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import ClipPPOLoss

from knobwise.agents.controller.actor import collect
from knobwise.agents.controller.controller import Controller
from knobwise.agents.training.stage import Stage
from knobwise.common.errors import InputError
from knobwise.envs.bandit.outcomes import moments
from knobwise.envs.bandit.reward import share_on_time
from knobwise.losses import ExactGRPOLoss, GRPOLoss, RCELoss, dropping_out
from knobwise.losses.functional import STD_FLOOR, even_weight, reward_spread
from knobwise.losses.kl_control import weight_control
from knobwise.losses.own import OwnLoss, own_parameters, own_tensors

if TYPE_CHECKING:
    from knobwise.agents.training.controllers import ControllerSetup
    from knobwise.agents.training.trainer import Trainer

RCE_TEMPERATURES = 3.0, 0.6
"""τ of RCE at its beginning and its end, in units of the spread of rewards; it falls linearly."""
TRIED = 8
"""Contexts for each network that a loss of the user's own is tried on."""
VALUE_COEFF = 1.0
"""Weight of the squared error of PPO's value network."""
VALUE_UNIT = 3.0
"""PPO's rewards and values are in units of so many spreads of rewards: the value network begins at
0, and what it learns is near 1."""


class ControllerStage(Stage):
    """A stage of a controller's training; args but for `setup` as in `Stage`."""

    def __init__(self, setup: ControllerSetup, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, setup.settings, **settings)
        self.setup = setup

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Sample actions only to log them; this stage's loss needs only the rows."""
        setup = self.setup
        policies = self._policies(reference=True) if self.watched else {}
        contexts = collect(setup.actor, contexts, policies, draws=self.watched, exact=setup.exact)
        return contexts if setup.critic is None else setup.critic(contexts)

    def _policies(self, reference: bool) -> dict[str, Controller]:
        """Name the controllers whose log-probs of the draws (under an exact loss of all
        configurations) are stored with the contexts."""
        names = ("action_log_prob", "reference_log_prob")
        if self.setup.exact:
            names = ("behaviour_log_probs", "reference_log_probs")
        policies = {names[0]: self.setup.controller}
        if reference:
            policies[names[1]] = self.setup.reference
        return policies

    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Compute mean and standard deviation of reward, accuracy and latency over the drawn
        groups, and under deadlines the share of draws that are late, or cost more than a limit.

        Which of a cell's measurements a draw got is not noted: each counts for its share.
        """
        data = data.flatten(0, 1).cpu()
        rows = data["row"].unsqueeze(1)
        measured = self.setup.env.table.measurements_ms[rows, data["configuration"]]  # [n, G, R]
        # a copy on a slower machine gets the answers of its sample
        values = self.setup.problem.values
        cells = rows % values.num_samples, data["configuration"]
        accuracy = values.accuracy[cells]
        latency = measured.nanmean(-1)
        metrics = moments(
            {"Reward": data["next", "reward"], "Accuracy": accuracy, "Latency": latency}
        )
        if measured.shape[-1] > 1:
            # between cells, and inside them
            inside = (measured - latency.unsqueeze(-1)).square().nanmean(-1).mean()
            metrics["Latency_Std"] = math.sqrt(metrics["Latency_Std"] ** 2 + float(inside))
        if self.setup.rule.late:
            late = 1 - share_on_time(measured, data["budget_ms"].unsqueeze(1))
            over = self.setup.over
            if over is not None:
                late = late.masked_fill(over[cells], 1.0)
            metrics["Budget_Violation_Rate"] = float(late.mean())
        return metrics

    @torch.no_grad()
    def measure_spread(self, rewards: Tensor, weight: Tensor) -> None:
        """Set the unit of rewards to their spread under these weights, both [n, C], unless the
        settings name a unit."""
        spread = reward_spread(rewards.where(weight > 0, 0.0), weight)
        # without differences any unit will do
        self.reward_spread = self.setup.loss.reward_spread or float(spread) or 1.0


class RCE(ControllerStage):
    """The warm-up of heads without a teacher: they imitate the softmax of the rewards."""

    name = "RCE"
    loss_name = "RCE_Loss"
    dropout = True

    def __init__(self, setup: ControllerSetup) -> None:
        settings = setup.settings
        super().__init__(
            setup,
            setup.controller,
            iterations=settings.pretrain_iterations,
            lr=settings.pretrain_lr,
        )
        self.rce = RCELoss(setup.actor, functional=False)
        self.stored = {*self.rce.in_keys}

    def start(self, trainer: Trainer) -> None:
        """Measure how much rewards differ among the better half of each context's configurations.

        What is far too late would hide the differences between those that compete.
        """
        rewards, _ = self.setup.rewards_in_training()
        count = (rewards > -torch.inf).sum(-1)
        rank = rewards.argsort(-1, descending=True).argsort(-1)
        self.measure_spread(rewards, even_weight(rank < (count.unsqueeze(-1) + 1) // 2))

    def prepare(self, share: float, watched: bool) -> None:
        """Set τ."""
        super().prepare(share, watched)
        start, end = RCE_TEMPERATURES
        temperature = start + (end - start) * share
        self.rce.temperature.fill_(temperature * (self.reward_spread or 1.0))
        self.rce.diagnostics = watched

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Compute the cross-entropy to softmax(reward/τ) over all configurations of each context, a
        scalar."""
        out: TensorDictBase = self.rce(self.setup.with_rewards(minibatch))
        return out


class GRPO(ControllerStage):
    """GRPO over the draws of the policy."""

    name = "GRPO"

    def __init__(self, setup: ControllerSetup, module: nn.Module | None = None) -> None:
        settings = setup.settings
        super().__init__(
            setup,
            module or setup.controller,
            iterations=settings.iterations,
            lr=settings.lr,
            patience=settings.patience,
        )
        self.dropout = setup.drops_out
        self.grpo = self._make_loss()
        # with nothing to drop out the loss itself tells how the policy decides
        noisy = setup.controller.config.dropout or setup.augment
        self._tells_dropout = self.dropout and bool(noisy)
        if setup.loss.kl_band:
            self.kl_controls = [weight_control(self.grpo.kl_to_ref_coeff, setup.loss.kl_band)]
        self.stored = self._stored()

    def _stored(self) -> set[Any]:
        """Return the collected keys that the loss reads, and those that metrics need."""
        keys = {*self.grpo.in_keys, "row", "configuration", ("next", "reward")}
        return keys - {"action"}

    def _make_loss(self) -> Any:
        """Make the LossModule that the stage minimises; subclasses make another."""
        return GRPOLoss(self.setup.actor, **self._coefficients(), functional=False)

    def _coefficients(self) -> dict[str, Any]:
        """Collect the arguments of the loss; β and η are those of the setup."""
        setup = self.setup
        coefficients = {"kl_to_ref_coeff": setup.kl_coeff, "entropy_coeff": setup.entropy_coeff}
        return setup.loss.of_grpo() | coefficients

    def start(self, trainer: Trainer) -> None:
        """Measure how much rewards differ between the policy's draws, and take the end of the
        warm-up as the reference.

        At the end of the warm-up the temperature is low and the policy is sharp. RCE's best
        held-out state may have been better, but GRPO soon makes up for that.
        """
        setup = self.setup
        rewards, contexts = setup.rewards_in_training()
        self.measure_spread(rewards, setup.actor.get_dist(contexts).log_probs.exp())
        setup.reference.load_state_dict(setup.controller.state_dict())
        # the score of each held-out sample where GRPO begins
        if self.first:
            held_out = setup.held_out
            self.scores_before = held_out.scores(held_out.policies(setup.held_out_log_probs))

    def prepare(self, share: float, watched: bool) -> None:
        super().prepare(share, watched)
        self.grpo.diagnostics = watched
        self.grpo.reward_spread = self.reward_spread

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Draw, and note the log-probs of the draws, those of the reference where they are read."""
        policies = self._policies(reference=self.watched or self.setup.kl_coeff > 0)
        return collect(self.setup.actor, contexts, policies)

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        out: TensorDictBase = self.grpo(minibatch)
        return self._with_plain_diagnostics(out, minibatch)

    def _with_plain_diagnostics(
        self, out: TensorDictBase, contexts: TensorDictBase
    ) -> TensorDictBase:
        """Replace the diagnostics of a loss that drops out by those of the policy as it draws.

        KL, entropy and ratios would else be those of what drops out, and `kl_band` would follow
        them. What is minimised stays as it is, and so does `cut_fraction`, which says what the clip
        did there. Without dropout nothing is drawn, so no random stream moves on.
        """
        if not (self.watched and self._tells_dropout):
            return out
        with torch.no_grad(), dropping_out(False):
            plain = self._diagnosed_plainly(contexts)
        return out.update(plain)

    def _diagnosed_plainly(self, contexts: TensorDictBase) -> dict[str, Tensor]:
        """Return diagnostics by name, of the policy without dropout."""
        out = self.grpo(contexts).items()
        return {
            key: value
            for key, value in out
            if not key.startswith("loss_") and key != "cut_fraction"
        }

    def metrics(self, data: TensorDictBase) -> dict[str, float]:
        metrics = super().metrics(data)
        if self.kl_controls:
            metrics["Beta"] = float(self.grpo.kl_to_ref_coeff)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        reference = self.setup.reference.state_dict()
        return super().state_dict() | {"reference": reference, "scores_before": self.scores_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.setup.reference.load_state_dict(state["reference"])
        self.scores_before = state["scores_before"]


class ExactGRPO(GRPO):
    """GRPO in expectation over all configurations, whose rewards the table knows."""

    def _make_loss(self) -> Any:
        return ExactGRPOLoss(self.setup.actor, **self._coefficients(), functional=False)

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Note all log-probs; draw only where it is watched."""
        policies = self._policies(reference=self.watched or self.setup.kl_coeff > 0)
        return collect(self.setup.actor, contexts, policies, draws=self.watched, exact=True)

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        contexts = self.setup.with_rewards(minibatch)
        out: TensorDictBase = self.grpo(contexts)
        return self._with_plain_diagnostics(out, contexts)


class PPO(GRPO):
    """PPO with a value network (Schulman et al. 2017, "Proximal Policy Optimization Algorithms",
    equation 9)."""

    name = "PPO"

    def __init__(self, setup: ControllerSetup) -> None:
        super().__init__(setup, nn.ModuleList([setup.controller, setup.critic]))
        self.stored = {*self.stored, "state_value"}

    def _make_loss(self) -> Any:
        loss = self.setup.loss
        return ClipPPOLoss(
            self.setup.actor,
            self.setup.critic,
            clip_epsilon=loss.clip_epsilon,
            entropy_coeff=self.setup.entropy_coeff,
            critic_coeff=VALUE_COEFF,
            loss_critic_type="l2",
            functional=False,
        )

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Draw, and note what the value network expects."""
        return self.setup.critic(super().collect(contexts))

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return PPO's loss of a minibatch.

        An episode is one step, so the return of a draw is its reward. Its advantage is reward − V,
        with V as it was at collection. V is fitted to the mean reward of a context's draws, which
        has the same gradient as fitting it to each draw.
        """
        contexts = minibatch.copy()
        loss = self.setup.loss
        unit = VALUE_UNIT * (self.reward_spread or 1.0)
        rewards = contexts["next", "reward"] / unit  # [P, M, G]
        contexts["action"] = self.setup.controller.configurations[contexts["configuration"]]
        contexts["value_target"] = rewards.mean(-1, keepdim=True)
        advantage = rewards - contexts["state_value"]
        if loss.advantage == "zscore":
            floor = STD_FLOOR / VALUE_UNIT
            if loss.advantage_std_floor is not None:
                floor = loss.advantage_std_floor / unit
            std = advantage.std().clamp_min(floor) + loss.advantage_std_eps / unit
            advantage = (advantage - advantage.mean()) / std
        contexts["advantage"] = advantage.unsqueeze(-1)
        out: TensorDictBase = self.grpo(contexts)
        # some diagnostics come for each draw
        return self._with_plain_diagnostics(out, contexts).apply(torch.mean)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"critic": self.setup.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.setup.critic.load_state_dict(state["critic"])


class OwnGRPO(GRPO):
    """A loss of the user's own in the place of GRPO's, see `knobwise.losses.own`."""

    logs_all = True

    def __init__(self, setup: ControllerSetup, own_loss: OwnLoss) -> None:
        self.own_loss = own_loss
        self.name = own_loss.name
        super().__init__(setup)
        plain = ExactGRPOLoss if own_loss.exact else GRPOLoss
        self._plain = plain(setup.actor, functional=False)
        # further weights of the loss, such as a learned baseline, learn along
        further = own_parameters(self.grpo, setup.actor)
        if further:
            self.module = nn.ModuleList([setup.controller, nn.ParameterDict(further)])
        # the draws of a trial are no part of the training, nor is what a loss keeps of it: another
        # one of its class is tried
        with torch.random.fork_rng(devices=[]):
            trained, self.grpo = self.grpo, self._make_loss()
            self.own_loss.check(self.grpo, self._tried_on(), setup.controller)
            self.grpo = trained

    def _stored(self) -> set[Any]:
        log_probs = self._policies(reference=True)
        return {*self.setup.actor.in_keys, *log_probs, "row", "configuration", ("next", "reward")}

    def _make_loss(self) -> nn.Module:
        settings = self._coefficients() | {"functional": False}
        loss = self.own_loss.make(self.setup.actor, settings)
        if self.setup.loss.kl_band and not hasattr(loss, "kl_to_ref_coeff"):
            raise InputError(
                f"loss.kl_band: {self.own_loss.key} has no kl_to_ref_coeff to follow the KL; "
                "leave it out"
            )
        return loss

    @torch.no_grad()
    def _tried_on(self) -> TensorDictBase:
        """Return contexts as the loss gets them in training, [n, M]."""
        setup = self.setup
        rewards, contexts = setup.rewards_in_training()
        count = min(TRIED * setup.networks, len(rewards))
        tried: TensorDictBase = contexts[:count].copy()
        tried = self.collect(tried)
        finite = rewards[:count].where(rewards[:count].isfinite(), 0.0)
        drawn = finite.gather(1, tried["configuration"])
        tried["next"] = TensorDict({"reward": drawn}, [count])
        self.reward_spread = 1.0
        self.prepare(0.0, True)
        # no more than the buffer will hold
        tried = tried.select(*self.stored)
        if self.own_loss.exact:
            # nothing is drawn where nobody watches
            tried = tried.exclude("configuration", "next")
        shape = count // setup.networks, setup.networks
        return self._with_rewards(tried.unflatten(0, shape))

    def _with_rewards(self, minibatch: TensorDictBase) -> TensorDictBase:
        return self.setup.with_rewards(minibatch) if self.own_loss.exact else minibatch

    def collect(self, contexts: TensorDictBase) -> TensorDictBase:
        """Draw, and note all that a loss may read."""
        policies = self._policies(reference=True)
        exact = self.own_loss.exact
        draws = self.watched or not exact
        return collect(self.setup.actor, contexts, policies, draws=draws, exact=exact)

    def loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """See `OwnLoss`."""
        contexts = self._with_rewards(minibatch)
        out = self.own_loss(self.grpo, contexts)
        return self._with_plain_diagnostics(out, contexts) if "kl_to_ref" in out else out

    def _diagnosed_plainly(self, contexts: TensorDictBase) -> dict[str, Tensor]:
        """Return the KL alone. It is that of GRPO's own loss: one of the user's may change what it
        keeps whenever it is called."""
        return {"kl_to_ref": self._plain(contexts)["kl_to_ref"]}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"own": own_tensors(self.grpo, self.setup.actor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        kept = own_tensors(self.grpo, self.setup.actor)
        shapes = [
            {name: each.shape for name, each in part.items()} for part in (state["own"], kept)
        ]
        if shapes[0] != shapes[1]:
            differ = sorted(name for name, _ in {*shapes[0].items()} ^ {*shapes[1].items()})
            raise InputError(
                f"{self.own_loss.key}: {differ[0]}: the stopped training had it in another shape, "
                "or not at all; register what the loss keeps in its __init__, in the shape that it "
                "has throughout, or start again under another name=…"
            )
        for name, values in kept.items():
            values.copy_(state["own"][name])


def grpo_stage(setup: ControllerSetup) -> GRPO:
    """Make the last stage by `loss.objective`: draws, all configurations, PPO with a critic, or a
    loss of the user's own."""
    if setup.own_loss is not None:
        return OwnGRPO(setup, setup.own_loss)
    kinds = {"sampled": GRPO, "exact": ExactGRPO, "ppo": PPO}
    return kinds[setup.loss.objective](setup)
