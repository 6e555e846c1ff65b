"""The training of a selector, one stage at a time: supervised fine-tuning on beams, RCE, GRPO.

Each stage is a training of its own that starts from the selector of an earlier stage, so that
several stages may start from the same one. GRPO replays recorded sequences, or draws its own and
has them scored: by a scorer, or by a learned reward that the scorer corrects.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knobwise.agents.selector.actor import SelectorActor
from knobwise.agents.selector.evaluation import choose, judged_choices, recorded_choices
from knobwise.agents.selector.reward_model import REWARD, RewardModel
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.stages import STAGES, SelectorStage, informative, spread_of
from knobwise.agents.training.seeding import seeded, weight_sums
from knobwise.agents.training.settings import StageConfig
from knobwise.agents.training.stage import Validation
from knobwise.agents.training.state import Provenance
from knobwise.agents.training.trainer import Trainer
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.settings import DemonstrationRewardConfig, GroupConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit, Scorer
from knobwise.envs.tables.profile_table import Split
from knobwise.losses.functional import k3
from knobwise.losses.settings import SelectorLossConfig

if TYPE_CHECKING:
    from knobwise.agents.training.stage import Log


class SelectorSetup:
    """Everything that a stage of a selector is trained with. To be made inside `seeded`.

    Args:
        stage: `sft`, `rce` or `grpo`.
        table, split, start, shots, scorer, live, groups, config, loss, reward, seen: as in
            `selector_trainer`.
        reference: the selector that GRPO's KL is taken to.
        reward_model: is copied.

    Attributes:
        agent, reference: the actor that learns, and that of the reference.
        env: where queries and rewards come from.
        fitted: the rows of the queries that are fitted or chosen on.
        seen: their fingerprints, and those of the training that went before.
        calls: how often the scorer was asked in training.
        reward_spread: how much rewards differ in the records; None where they do not tell.
    """

    def __init__(
        self,
        stage: str,
        table: BeamTable,
        split: Split,
        start: Selector,
        *,
        reference: Selector,
        shots: int = 2,
        scorer: Scorer | None = None,
        live: bool = False,
        reward_model: RewardModel | None = None,
        groups: GroupConfig | None = None,
        config: StageConfig | None = None,
        loss: SelectorLossConfig | None = None,
        reward: DemonstrationRewardConfig | None = None,
        seen: Sequence[str] | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.table = table
        self.split = split
        self.shots = shots
        self.scorer = scorer
        self.seed = seed
        self.device = torch.device(device)
        self.config = config or StageConfig()
        self.settings = self.config.optimiser(len(split.train))
        self.loss = loss or SelectorLossConfig()
        self.calls = 0
        self.fitted = [*split.train.tolist(), *split.validation.tolist()]
        self.seen = [table.fingerprints[row] for row in self.fitted] if seen is None else [*seen]
        self._check(stage, live, reward_model)
        # live draws are scored by the scorer, or if there is one by the reward model
        self.reward_model = copy.deepcopy(reward_model)
        scored_by: Scorer | None = self.answer if live else None
        if self.reward_model is not None:
            scored_by = functools.partial(self.reward_model.score, table)
            live = True
            reward = replace(REWARD, shuffled=reward is not None and reward.shuffled)
        weights = self._started_from(start, reference)
        self.identity = [*weights, stage, live, shots, self.config, self.loss, reward, groups]
        # the actor, its reference, and the environment
        self.agent = self._actor(start).to(self.device).eval()
        self.reference = self._actor(reference).to(self.device).eval().requires_grad_(False)
        self.agent.selector.stage = stage
        self._env = functools.partial(
            DemonstrationBandit,
            table,
            unprofiled="error",
            observe_features=False,
            group_size=self.loss.group_size if live else "all",
            shots=shots if live else None,
            reward=reward,
            groups=groups,
            seed=seed,
            device=self.device,
        )
        self.env = self._env(batch_size=self.settings.contexts, rows=split.train, scorer=scored_by)
        # SFT learns from no rewards
        self.reward_spread: float | None = None
        if stage != "sft":
            self.reward_spread = self.loss.reward_spread or self._recorded_spread(reward, groups)
        self.stage: SelectorStage = STAGES[stage](self)

    @property
    def judged_by(self) -> str:
        """The score of held-out queries: whether answers are right, or without them the beam's."""
        answered = self.scorer is not None or "vqa_correct" in self.table.fields
        return "accuracy" if answered else "beam score"

    def answer(self, rows: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
        """Score sequences by the scorer, and count the calls."""
        assert self.scorer is not None
        self.calls += len(rows)
        return self.scorer(rows, demonstrations)

    def _started_from(self, start: Selector, reference: Selector) -> list[Any]:
        """Return sums of the weights that the stage starts from, and what the reward model is."""
        sums: list[Any] = [weight_sums(policy.state_dict()) for policy in (start, reference)]
        if self.reward_model is not None:
            sums += [self.reward_model.config, weight_sums(self.reward_model.weights)]
        return sums

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
        return spread_of(recorded.rewards[rows], recorded.group_mask[rows])

    # -- held-out data -----------------------------------------------------------------------------

    def validate(self, logged: bool) -> Validation:
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
        distributions: dict[str, Tensor] = {}
        if logged or self.config.keep == "best_kl":
            more, distributions = self._validation_metrics()
            metrics |= more
        return Validation(score, metrics, distributions=distributions)

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
    def _validation_metrics(self) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the loss on the validation queries, after SFT the KL to the SFT policy, and in
        GRPO what the advantages are; and these themselves, by name.

        The KL is k3, over the policy's draws.
        """
        live = self._validation.scorer is not None
        self._validation.contexts.set_back(0)
        # the same draws each time: evaluations differ by the policy, not by luck
        with seeded(self.seed, self.device):
            batch = self._validation.reset()
            drawn = batch.select("row")
            dist = self.agent.policy(drawn)
            drawn["action"], log_prob = dist.sample_with_log_prob(self.agent.group_size)
            batch["action"] = drawn["action"] if live else batch["sequences"]
            batch = informative(self._validation.step(batch))
        metrics = {"Loss": float(self.stage.validation_loss(batch))}
        if self.stage.name != "sft":
            reference = self.reference.policy(drawn).log_prob(drawn["action"])
            metrics["KL"] = float(k3(log_prob, reference).mean())
        advantages = self.stage.validation_advantages(batch)
        if advantages is None:
            return metrics, {}
        metrics["Advantage_Mean"] = float(advantages.mean())
        metrics["Advantage_Std"] = float(advantages.std(correction=0))
        return metrics, {"Advantages": advantages.cpu()}


def selector_trainer(
    stage: str,
    table: BeamTable,
    split: Split,
    start: Selector,
    *,
    reference: Selector | None = None,
    seed: int = 0,
    device: str = "cpu",
    folder: Path | None = None,
    log: Log | None = None,
    **settings: Any,
) -> Trainer:
    """Return the training of one stage of one selector with one seed.

    Args:
        stage: `sft`, `rce` or `grpo`.
        split: fit on `train`, choose the epoch on `validation`.
        start: the selector that the stage starts from (it is copied).
        reference: the selector that GRPO's KL is taken to, from SFT; None for `start`.
        seed, device, folder, log: see `Trainer`.
        settings: `shots`, T, the demonstrations in a sequence of live draws and of judging;
            recorded sequences of every length are learned from.
            `scorer` judges sequences on held-out queries; None judges by the recorded answers.
            `live`: GRPO draws its own sequences, and the scorer scores them. `reward_model`: GRPO
            draws its own sequences, and this model scores them (it is copied); at the beginning of
            each epoch the scorer corrects it by a share of the true calls; it ignores `reward`,
            except for `shuffled`. `groups`: how recorded sequences are grouped. `seen`: the
            fingerprints of the queries that count as trained on; None for those of this table. And
            `config`, `loss`, `reward`.
    """
    with seeded(seed, device):
        setup = SelectorSetup(
            stage,
            table,
            split,
            start,
            reference=reference or start,
            seed=seed,
            device=device,
            **settings,
        )
        return Trainer(
            setup.agent,
            [setup.stage],
            setup.env,
            table=table,
            settings=setup.settings,
            shape=(setup.settings.contexts,),
            reads=setup.agent.in_keys,
            validate=setup.validate,
            judged_by=setup.judged_by,
            identity=setup.identity,
            trained_on="other beams or options",
            provenance=selector_provenance,
            setup=setup,
            kept=setup.agent.selector,
            keeps_epochs=True,
            seed=seed,
            folder=folder,
            log=log,
            device=device,
        )


def selector_provenance(trainer: Trainer) -> Provenance:
    """Return how the selector came about: from which queries, how good on validation."""
    setup: SelectorSetup = trainer.setup
    return {
        "validation": trainer.state.best.score,
        "epoch": trainer.epoch,
        "shots": setup.shots,
        "reward_spread": trainer.stages[-1].reward_spread,
        "policy": None if trainer.folder is None else trainer.folder.name,
        "fitted": [setup.table.query_ids[row] for row in setup.fitted],
        "seen": setup.seen,
    }
