"""The training of a selector, one stage at a time: supervised fine-tuning on beams, RCE, GRPO.

Each stage is a training of its own that starts from the selector of an earlier stage, so that
several stages may start from the same one. GRPO replays recorded sequences, or draws its own and
has them scored: by a scorer, or by a learned reward that the scorer corrects. The loop is that of
`knobwise.agents.training.loop`.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from knobwise.agents.selector.actor import SelectorActor, SequenceBehaviour
from knobwise.agents.selector.evaluation import (
    LOWEST,
    choose,
    draw,
    judged_choices,
    recorded_choices,
)
from knobwise.agents.selector.reward_model import REWARD, RewardModel
from knobwise.agents.selector.selector import Selector
from knobwise.agents.training.loop import Trainer
from knobwise.agents.training.seeding import seeded, weight_sums
from knobwise.agents.training.settings import OptimiserConfig, StageConfig
from knobwise.agents.training.stage import Stage
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit, Scorer
from knobwise.envs.tables.profile_table import Split
from knobwise.losses import GRPOLoss, RCELoss
from knobwise.losses.functional import even_weight, expectation, expected_k3, k3, reward_spread
from knobwise.losses.kl_control import temperature_control, weight_control
from knobwise.losses.settings import SelectorLossConfig

RCE_TEMPERATURES = 2.0, 0.5
"""τ of the RCE warm-up at its beginning and its end, in units of the spread of rewards; it falls
linearly."""
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


class SelectorTrainer(Trainer):
    """Trains one stage of one selector with one seed.

    Args:
        stage: `sft`, `rce` or `grpo`.
        split: fit on `train`, choose the epoch on `validation`.
        start: the selector that the stage starts from (it is copied).
        reference: the selector that GRPO's KL is taken to, from SFT; None for `start`.
        shots: T, the demonstrations in a sequence of live draws and of judging.
        scorer: judges sequences on held-out queries; None judges by the recorded answers.
        live: GRPO draws its own sequences, and the scorer scores them.
        reward_model: GRPO draws its own sequences, and this model scores them (it is copied). At
            the beginning of each epoch the scorer corrects it by a share of the true calls. It
            ignores `reward`, except for `shuffled`.
        groups: how recorded sequences are grouped.
        seed, device, **options: see `Trainer`, which also takes `folder` and `log`.
    """

    agent: SelectorActor
    reference: SelectorActor
    table: BeamTable
    trained_on = "on other beams or with other settings"
    kept = (*Trainer.kept, "calls")
    keeps_epochs = True
    calls = 0
    temperature: float
    """τ of the present iteration of RCE, in units of the spread of rewards."""

    def __init__(
        self,
        stage: str,
        table: BeamTable,
        split: Split,
        start: Selector,
        *,
        reference: Selector | None = None,
        shots: int = 2,
        scorer: Scorer | None = None,
        live: bool = False,
        reward_model: RewardModel | None = None,
        groups: GroupConfig | None = None,
        config: StageConfig | None = None,
        loss: SelectorLossConfig | None = None,
        reward: DemonstrationRewardConfig | None = None,
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.config = config or StageConfig()
        settings = self.config.optimiser(len(split.train))
        super().__init__(table, split, settings, seed=seed, device=device, **options)
        self.loss = loss or SelectorLossConfig()
        self.shots = shots
        self.scorer = scorer
        self.judged_by = "accuracy"
        if scorer is None and "vqa_correct" not in table.fields:
            self.judged_by = "beam score"
        self._check(stage, live, reward_model)
        reference = reference or start
        # live draws are scored by the scorer, or if there is one by the reward model
        self.reward_model = copy.deepcopy(reward_model)
        self.corrected = dict[str, float]()
        scored_by: Scorer | None = self._answer if live else None
        identity: list[Any] = [weight_sums(policy.state_dict()) for policy in (start, reference)]
        if self.reward_model is not None:
            identity += [self.reward_model.config, weight_sums(self.reward_model.weights)]
            scored_by = functools.partial(self.reward_model.score, table)
            live = True
            reward = replace(REWARD, shuffled=reward is not None and reward.shuffled)
            self.stateful = (*self.stateful, "reward_model")
        identity += [stage, live, shots, self.config, self.loss, reward, groups]
        with seeded(seed, device):
            agent = self._actor(start).to(device).eval()
            frozen = self._actor(reference).to(device).eval().requires_grad_(False)
            agent.selector.stage = stage
            about: dict[str, Any] = {"unprofiled": "error", "lean": True, "group_size": "all"}
            about |= {"reward": reward, "groups": groups, "seed": seed, "device": device}
            if live:
                about |= {"group_size": self.loss.group_size, "shots": shots}
            self._env = functools.partial(DemonstrationBandit, table, **about)
            env = self._env(batch_size=settings.contexts, rows=split.train, scorer=scored_by)
            # SFT learns from no rewards
            if stage != "sft":
                spread = self.loss.reward_spread or self._recorded_spread(reward, groups)
                self.reward_spread = spread
            behaviour = SequenceBehaviour(agent, frozen, with_log_probs=stage == "grpo")
            stages = [self._stage(stage, agent, settings)]
            shape = (settings.contexts,)
            self._assemble(agent, frozen, env, behaviour, stages, identity, STORED, shape)

    def _actor(self, selector: Selector) -> SelectorActor:
        """Return an actor of a copy of a selector."""
        selector = copy.deepcopy(selector)
        return SelectorActor(selector, self.table, self.shots, self.loss.group_size)

    def _check(self, stage: str, live: bool, reward_model: RewardModel | None) -> None:
        """Raise InputError for settings that do not go together."""
        calls = 0 if reward_model is None else reward_model.config.calls
        answered = live or reward_model is not None or "vqa_correct" in self.table.fields
        if calls and self.scorer is None:
            raise InputError(
                f"reward_model.calls={calls}: true calls need a scorer, which recorded beams do "
                "not have; set it to 0"
            )
        if stage == "sft" and self.config.keep == "best_kl":
            raise InputError(
                "sft.keep=best_kl: the KL is to the policy that this stage makes; give best or last"
            )
        by_answer = self.loss.min_positive > 0 and self.loss.positive_above is None
        if stage == "grpo" and by_answer and not answered:
            raise InputError(
                f"loss.min_positive={self.loss.min_positive}: {self.table.name} does not say which "
                "answers were right; set it to 0, or loss.positive_above to a reward"
            )

    def _recorded_spread(
        self, reward: DemonstrationRewardConfig | None, groups: GroupConfig | None
    ) -> float | None:
        """Return how much the rewards of the recorded sequences of a training query differ; None if
        the reward needs more than was recorded."""
        rows = self.split.train
        try:
            recorded = DemonstrationBandit(self.table, rows=rows, reward=reward, groups=groups)
        except InputError:
            return None
        return _spread_of(recorded.rewards[rows], recorded.group_mask[rows])

    @property
    def selector(self) -> Selector:
        """The selector that is trained."""
        return self.agent.selector

    trained = selector

    # -- the stage ---------------------------------------------------------------------------------

    def _stage(self, name: str, agent: SelectorActor, settings: OptimiserConfig) -> Stage:
        """Build the losses, and return the stage."""
        # both losses for every stage: the metrics read GRPO's coefficient in all of them
        device = agent.pool.device
        self.imitation = RCELoss(agent, recorded=True, functional=False).to(device)
        self.grpo = GRPOLoss(agent, **self.loss.of_grpo(), masked=True, functional=False).to(device)
        controls = []
        if name == "grpo" and self.loss.kl_band is not None:
            controls.append(weight_control(self.grpo.kl_to_ref_coeff, self.loss.kl_band))
        if name == "grpo" and self.loss.temperature_band is not None:
            controls.append(temperature_control(agent.temperature, self.loss.temperature_band))
        return Stage(
            name,
            self._stage_loss,
            settings.iterations,
            settings.lr,
            settings.weight_decay,
            settings.clip_grad,
            self._prepare,
            kl_controls=controls,
            dropout=name == "sft",
        )

    def _prepare(self, share: float, watched: bool) -> None:
        """Set the losses for this iteration; at the beginning of an epoch correct the reward
        model."""
        start, end = RCE_TEMPERATURES
        temperature = start + (end - start) * share
        if self.stage.name == "sft":
            temperature = math.inf  # all recorded sequences weigh the same
        self.temperature = temperature
        self.imitation.temperature.fill_(temperature * (self.reward_spread or 1.0))
        self.imitation.diagnostics = self.grpo.diagnostics = watched
        self.grpo.top = CURRICULUM_TOP if share < self.loss.curriculum else None
        if self.reward_model is not None and self.evaluates:
            self._correct(self.reward_model)

    def _answer(self, rows: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
        """Score sequences by the scorer, and count the calls."""
        assert self.scorer is not None
        self.calls += len(rows)
        return self.scorer(rows, demonstrations)

    def _correct(self, model: RewardModel) -> None:
        """Spend this epoch's share of the true calls on the policy's draws for training queries.

        The queries come in random order, all of them before any comes again.
        """
        calls = model.config.calls
        epochs = self.config.epochs
        train = self.split.train
        # shares differ by one where the calls do not divide evenly
        count = calls * (self.epoch + 1) // epochs - calls * self.epoch // epochs
        if not count:
            return
        # all training queries in random order, as often as it takes
        passes = [train[torch.randperm(len(train))] for _ in range(math.ceil(count / len(train)))]
        rows = torch.cat(passes)[:count]
        drawn = draw(self.agent, rows, self.loss.group_size)
        self.corrected = model.correct(
            self.table, rows, bank_rows(self.table.pool[rows], drawn), self._answer
        )

    def _stage_loss(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return the loss of the stage on the queries that have something to teach."""
        if self.stage.name != "grpo":
            return self.imitation(_taught(minibatch))
        if self.reward_spread is None:
            # nothing was recorded that tells: by the draws that it learns from first
            self.reward_spread = _spread_of(minibatch["next", "reward"], _present(minibatch))
        self.grpo.reward_spread = self.reward_spread
        taught = _taught(minibatch, self.loss.min_positive, self.loss.positive_above)
        out: TensorDictBase = self.grpo(taught)
        if self._watched and self.loss.temperature_band is not None:
            # at the temperature of the draws policies differ from those of another temperature;
            # the policy is that of all queries, also of those that teach nothing now
            out["kl_to_ref"] = self._kl_of_policy(_taught(minibatch))
        return out

    @torch.no_grad()
    def _kl_of_policy(self, minibatch: TensorDictBase) -> Tensor:
        """Return the k3 KL to the reference policy over a minibatch, both at temperature 1."""
        action = minibatch["action"]
        log_prob = self.agent.policy(minibatch).log_prob(action)
        reference = self.reference.policy(minibatch).log_prob(action)
        weight = even_weight(minibatch["group_mask"])
        return expected_k3(log_prob, reference, weight=weight).mean()

    def _metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Return rewards and accuracy of the drawn sequences, and the coefficients."""
        present = _present(data)
        drawn = {"Reward": data["next", "reward"][present]}
        if self.reward_model is None:  # a predicted answer says nothing about the accuracy
            right = data["next", "vqa_correct"]
            drawn["Accuracy"] = right[present & ~right.isnan()]
        logged = {"Beta": float(self.grpo.kl_to_ref_coeff)}
        for name, values in drawn.items():
            if len(values):
                logged[f"{name}_Mean"] = float(values.mean())
                logged[f"{name}_Std"] = float(values.std(correction=0))
        if self.stage.name == "sft":
            return logged  # all sequences count alike, which is no temperature
        if self.stage.name == "rce":
            return logged | {"Temperature": self.temperature}
        if self.env.scorer is not None:
            logged |= {"True_Calls": self.calls} | self.corrected
        return logged | {"Temperature": float(self.agent.temperature)}

    # -- held-out data -----------------------------------------------------------------------------

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Judge greedy sequences of the validation queries by the scorer.

        Without a scorer, judge the recorded sequences that the policy ranks first.
        """
        rows = self.split.validation
        if self.scorer is None:
            preference = self.agent.recorded_log_probs(self.table, rows)
            outcome = recorded_choices(self._recorded, self.shots, [preference]).correct
        else:
            choices = [choose(self.agent, rows)]
            outcome = judged_choices(self.table, self.scorer, choices, rows).correct
        score = float(outcome.nanmean().nan_to_num())
        metrics = {f"{self.judged_by.title().replace(' ', '_')}_Mean": score}
        if self.log is not None or self.config.keep == "best_kl":
            metrics |= self._validation_metrics()
        return score, metrics

    def _is_better(self, score: float, metrics: Mapping[str, float]) -> bool:
        """Return True if the present epoch replaces the kept one, as `keep` says."""
        if self.config.keep == "best_kl":
            # any trained epoch replaces the start, whose KL is 0 where there was no RCE
            return self.best["iteration"] < 1 or metrics["KL"] < self.best["metrics"]["KL"]
        return self.config.keep == "last" or score > self.best["score"]

    @functools.cached_property
    def _recorded(self) -> BeamTable:
        """The records of the validation queries; scores stand in for unknown answers."""
        fields = self.table.fields
        outcome: Any = fields.get("vqa_correct", fields.get("beam_score"))
        return replace(self.table, fields={"vqa_correct": outcome}).select(self.split.validation)

    @functools.cached_property
    def _validation(self) -> DemonstrationBandit:
        """The environment of all validation queries at once.

        It asks the scorer directly, so that its calls do not count as calls of training.
        """
        rows = self.split.validation
        scorer = self.env.scorer
        if scorer is not None and self.reward_model is None:
            scorer = self.scorer
        return self._env(batch_size=len(rows), rows=rows, scorer=scorer)

    @torch.no_grad()
    def _validation_metrics(self) -> dict[str, float]:
        """Return the loss on the validation queries, and after SFT the KL to the SFT policy.

        The loss of SFT and RCE is their cross-entropy, for RCE at its last temperature. That of
        GRPO is −E_π[reward], its objective without baseline, clip and KL. The KL is k3, over the
        policy's draws.
        """
        stage = self.stages[0].name
        live = self._validation.scorer is not None
        self._validation.contexts.set_back(0)
        # the same draws each time: evaluations differ by the policy, not by luck
        with seeded(self.seed, self.device):
            batch = self._validation.reset()
            drawn = batch.select("row")
            dist = self.agent.policy(drawn)
            drawn["action"], log_prob = dist.sample_with_log_prob(self.agent.group_size)
            batch["action"] = drawn["action"] if live else batch["sequences"]
            batch = _taught(self._validation.step(batch))
        if stage == "grpo":
            reward = batch["next", "reward"]
            # draws count alike, recorded sequences by their probability within the group
            preference = torch.zeros_like(reward)
            if not live:
                preference = self.agent.policy(batch).log_prob(batch["action"])
            present = batch["group_mask"]
            weight = preference.masked_fill(~present, LOWEST).softmax(-1) * present
            loss = -expectation(reward, weight).mean()
        else:
            temperature = math.inf if stage == "sft" else RCE_TEMPERATURES[1]
            self.imitation.temperature.fill_(temperature * (self.reward_spread or 1.0))
            loss = self.imitation(batch)["loss_rce"]
        metrics = {"Loss": float(loss)}
        if stage != "sft":
            reference = self.reference.policy(drawn).log_prob(drawn["action"])
            metrics["KL"] = float(k3(log_prob, reference).mean())
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------

    def provenance(self) -> dict[str, Any]:
        """Return how the selector came about: from which queries, how good on validation."""
        rows = [*self.split.train.tolist(), *self.split.validation.tolist()]
        return {
            "validation": self.best["score"],
            "epoch": self.epoch,
            "shots": self.shots,
            "reward_spread": self.reward_spread,
            "policy": None if self.folder is None else self.folder.name,
            "fitted": [self.table.query_ids[row] for row in rows],
        }


def _present(batch: TensorDictBase) -> Tensor:
    """Return which sequences of each group exist, bool [P, G]; all do in live draws."""
    reward = batch["next", "reward"]
    return batch.get("group_mask", torch.ones_like(reward, dtype=torch.bool))


def _spread_of(rewards: Tensor, mask: Tensor) -> float:
    """Return how much the rewards of a group typically differ, [n, G]; 1 if none do."""
    return float(reward_spread(rewards, even_weight(mask))) or 1.0


def _taught(
    minibatch: TensorDictBase, min_positive: float = 0.0, positive_above: float | None = None
) -> TensorDictBase:
    """Return the queries of a minibatch that have something to teach, or all if none has.

    A query has nothing to teach if it has no sequences, or if less than a share `min_positive` of
    them is positive: has a reward above `positive_above`, or if that is None a right answer.
    """
    present = _present(minibatch)
    if min_positive > 0:
        if positive_above is None:
            positive = minibatch["next", "vqa_correct"] > 0.5
        else:
            positive = minibatch["next", "reward"] > positive_above
        count = (positive & present).sum(-1, keepdim=True)
        present = present & (count >= min_positive * present.sum(-1, keepdim=True))
    minibatch = minibatch.copy().set("group_mask", present)
    taught = present.any(-1)
    if taught.any():
        return minibatch[taught]
    return minibatch
