"""The training of a selector, one stage at a time: supervised fine-tuning on beams, RCE, GRPO.

Each stage is a training of its own that starts from what the one before it gave, so that several may start from the
same. GRPO replays recorded sequences, or with a scorer draws its own and has them scored. The loop is that of
`knobwise.agents.training.loop`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from knobwise.agents.checkpoint import load_checkpoint, save_checkpoint
from knobwise.agents.judging.evaluation import LOGGED
from knobwise.agents.selector.actor import SelectorActor, SequenceBehaviour
from knobwise.agents.selector.clip_encoder import ClipEncoder
from knobwise.agents.selector.evaluation import choose, judge
from knobwise.agents.selector.selector import Selector, StoredEmbeddings
from knobwise.agents.selector.settings import SelectorLossConfig, StageConfig
from knobwise.agents.training.loop import Log, Trainer
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.demonstrations.reward import DemonstrationRewardConfig
from knobwise.envs.demonstrations.torchrl_env import DemonstrationBandit, GroupConfig, Scorer
from knobwise.envs.tables.profile_table import Split
from knobwise.losses import GRPOLoss, RCELoss
from knobwise.losses.actor_loss import ActorLoss

KEPT = ("row", "action", "action_log_prob", "reference_log_prob", "group_mask")


class SelectorTrainer(Trainer):
    """Trains one stage of one selector with one seed.

    Args:
        stage: `sft`, `rce` or `grpo`.
        table: recorded beams.
        split: fit on `train`, choose the epoch on `validation`.
        start: what the stage starts from; it is copied.
        reference: what GRPO's KL is taken to, the SFT selector; None for `start`.
        embeddings: where features come from; None for those of the table. A `ClipEncoder` is copied, and trained; it is
            then `agent.embeddings`.
        reference_embeddings: the same of the reference; None for those that `embeddings` gives at the start.
        shots: T of live draws, and of judging.
        scorer: judges sequences on held-out queries; None judges by what was recorded.
        live: GRPO draws its own sequences, and the scorer scores them.
        groups: which recorded sequences make a group; not for live.
        config, loss, reward: the settings.
        seed, folder, log, device: see `Trainer`.
    """

    env: DemonstrationBandit
    agent: SelectorActor
    reference: SelectorActor

    def __init__(
        self,
        stage: str,
        table: BeamTable,
        split: Split,
        start: Selector,
        *,
        reference: Selector | None = None,
        embeddings: StoredEmbeddings | ClipEncoder | None = None,
        reference_embeddings: StoredEmbeddings | ClipEncoder | None = None,
        shots: int = 2,
        scorer: Scorer | None = None,
        live: bool = False,
        groups: GroupConfig | None = None,
        config: StageConfig | None = None,
        loss: SelectorLossConfig | None = None,
        reward: DemonstrationRewardConfig | None = None,
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str = "cpu",
    ) -> None:
        if live and scorer is None:
            raise InputError("live draws need a scorer; without one GRPO replays what was recorded")
        if not len(split.train) or not len(split.validation):
            raise InputError(f"{table.name}: training needs queries to fit on and others to choose the epoch on")
        self.table, self.split, self.shots, self.scorer, self.live = table, split, shots, scorer, live
        self.config, self.loss, self.groups = config or StageConfig(), loss or SelectorLossConfig(), groups
        self.reward, self._stage, self._start, self._reference = reward, stage, start, reference or start
        self._embeddings = embeddings or StoredEmbeddings(table.queries, table.candidates)
        self._reference_embeddings = reference_embeddings or self._embeddings
        self.judged_by = "beam score" if scorer is None and "vqa_correct" not in table.fields else "accuracy"
        steers = self.loss.kl_band is not None or self.loss.temperature_band is not None
        settings = self.config.optimiser(len(split.train))
        super().__init__(settings, steers=steers and stage == "grpo", seed=seed, folder=folder, log=log, device=device)

    @property
    def stage(self) -> str:
        return self._stage

    @property
    def selector(self) -> Selector:
        """What is trained."""
        return self.agent.selector

    def _set_up(self) -> None:
        table, scorer = self.table, self.scorer if self.live else None
        group = self.loss.group_size
        ends = ((self._start, self._embeddings), (self._reference, self._reference_embeddings))
        self.agent, self.reference = (
            SelectorActor(*copy.deepcopy(end), table.pool, self.shots, group).to(self.device).eval() for end in ends
        )
        self.reference.requires_grad_(False)
        self.selector.stage = self.stage
        self.env = DemonstrationBandit(
            table,
            batch_size=self.settings.contexts,
            group_size=group,
            shots=self.shots if self.live else None,
            reward=self.reward,
            rows=self.split.train,
            seed=self.seed,
            scorer=scorer,
            groups=self.groups or GroupConfig(),
            device=self.device,
        )
        self.imitation = RCELoss(self.agent, recorded=True, scores=self.loss.scores, functional=False).to(self.device)
        self.grpo = GRPOLoss(self.agent, **self.loss.of_grpo(), masked=True, functional=False).to(self.device)
        self.behaviour = SequenceBehaviour(self.agent, self.reference)
        self.behaviour.with_log_probs = self.stage == "grpo"
        kept = [*KEPT, ("next", "reward"), ("next", "vqa_correct")]
        self._collect_with(self.behaviour, kept, (self.settings.contexts,))

    def _begin_grpo(self) -> None:
        """The reference is given, and this is the only stage."""

    def _loss(self) -> ActorLoss:
        if self.stage == "grpo":
            # in eval mode: draws, old log-probs and the new ones are all taken without dropout, so that the ratio is 1
            self.grpo.top = self.loss.curriculum_top if self._share() < self.loss.curriculum else None
            return self.grpo
        start, end = self.loss.temperature_start, self.loss.temperature_end
        temperature = math.inf if self.stage == "sft" else start + (end - start) * self._share()
        self.imitation.temperature.fill_(temperature)
        self.agent.train(self.stage == "sft")
        return self.imitation

    def _loss_of(self, loss: ActorLoss, minibatch: TensorDictBase) -> TensorDictBase:
        there, least = _there(minibatch), self.loss.min_positive
        if loss is self.grpo and least > 0:
            right = (minibatch["next", "vqa_correct"] > 0.5) & there
            there = there & (right.sum(-1, keepdim=True) >= least * there.sum(-1, keepdim=True))
        minibatch = minibatch.copy().set("group_mask", there)
        taught = there.any(-1)  # means are over the queries that have something to teach
        return super()._loss_of(loss, minibatch[taught] if taught.any() else minibatch)

    def _steer(self, kl: float) -> None:
        if self.loss.kl_band is not None:
            self.grpo.adapt_kl(kl, *self.loss.kl_band)
        if self.loss.temperature_band is not None:
            low, high = self.loss.temperature_band
            change = 1 / 1.1 if kl > high else 1.1 if kl < low else 1.0
            self.agent.temperature = min(2.0, max(0.5, self.agent.temperature * change))

    def _metrics(self, data: TensorDictBase, seen: TensorDictBase) -> Mapping[str, float]:
        reward, right = data["next", "reward"], data["next", "vqa_correct"]
        there = _there(data)
        metrics = {"Reward": reward[there], "Accuracy": right[there & ~right.isnan()]}
        logged = {f"{name}_Mean": float(values.mean()) for name, values in metrics.items() if len(values)}
        logged |= {f"{name}_Std": float(values.std(correction=0)) for name, values in metrics.items() if len(values)}
        logged |= {name: float(seen[key]) for key, name in LOGGED.items() if key in seen}
        logged |= {"LR": self._learning_rate(), "Beta": float(self.grpo.kl_to_ref_coeff)}
        return {f"Train/{name}": value for name, value in logged.items()} | {
            "Train/Temperature": self.agent.temperature if self.stage == "grpo" else float(self.imitation.temperature)
        }

    # -- what was held out ---------------------------------------------------------------------------------------------

    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Greedy sequences of the validation queries, scored; or of what was recorded of them, what ranks first."""
        rows = self.split.validation
        if self.scorer is None:
            found = self._recorded_first(rows)
        else:
            chosen = choose(self.selector, self.agent.embeddings, self.table, rows, self.shots)
            found = float(judge(self.table, self.scorer, chosen, rows).mean())
        return found, {f"{self.judged_by.title().replace(' ', '_')}_Mean": found}

    def _is_best(self, score: float) -> bool:
        return self.config.keep == "last" or super()._is_best(score)

    @torch.no_grad()
    def _recorded_first(self, rows: Tensor, at_once: int = 512) -> float:
        """Mean outcome of the recorded sequence that the policy finds most probable, whatever the group: right or
        wrong, or where that is not known its score. Over queries that have any."""
        table, found = self.table, []
        outcome = table.fields["vqa_correct" if "vqa_correct" in table.fields else "beam_score"]
        there = table.beam_mask & (table.lengths == self.shots) & ~outcome.isnan()
        rows = rows[there[rows].any(1)]
        for part in rows.split(at_once) if len(rows) else ():
            batch = TensorDict({"row": part}, [len(part)], device=self.device)
            log_probs = self.agent.get_dist(batch).log_prob(table.sequences[part].to(self.device)).cpu()
            first = log_probs.masked_fill(~there[part], -torch.inf).argmax(1, keepdim=True)
            found.append(outcome[part].gather(1, first))
        return float(torch.cat(found).mean()) if found else 0.0

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self, folder: Path) -> None:
        epoch = self.iteration // self.settings.evaluate_every
        extra: dict[str, Any] = {"policy": folder.name, "validation": self.best["score"], "epoch": epoch}
        extra["fitted"] = [self.table.query_ids[row] for part in self.split[:2] for row in part.tolist()]
        extra["shots"] = self.shots
        if isinstance(self.agent.embeddings, ClipEncoder):
            extra["lora"] = self.agent.embeddings.lora_state()
        save_checkpoint(folder / f"epoch{epoch}.pt", self.selector, self.table, extra)
        if self.best["iteration"] == self.iteration:
            save_checkpoint(folder / "best.pt", self.selector, self.table, extra)
        self._save_last(folder)

    def _save_last(self, folder: Path) -> None:
        save_checkpoint(folder / "last.pt", self.selector, self.table, {"training": self.training_state()})

    def training_state(self) -> dict[str, Any]:
        return super().training_state() | {
            "agent": self.agent.state_dict(),
            "temperature": self.agent.temperature,
            "settings": self.settings_said(),
        }

    def settings_said(self) -> str:
        """Everything that has to be the same for a stopped stage to go on."""
        weights = (*self._start.state_dict().values(), *self._reference.state_dict().values())
        start = [float(values.double().sum()) for values in weights]
        return repr((self.stage, self.live, self.shots, self.config, self.loss, self.reward, self.groups, start))

    def resume(self, path: Path) -> bool:
        """Go on from a `last.pt`; the end is the same, bit for bit, as without the stop. False when there is none.

        Raises:
            InputError: it belongs to other beams, or to a training with other settings.
        """
        if not path.exists():
            return False
        loaded = load_checkpoint(path)
        state = loaded.extra.get("training", {})
        if loaded.profile_digest != self.table.digest or state.get("settings") != self.settings_said():
            raise InputError(f"{path}: was trained on other beams or with other settings; choose another name=…")
        self.go_on_from(state["agent"], state)
        self.agent.temperature = state["temperature"]
        return True

    def run(self) -> Selector:
        """Train to the end; gives the selector of the best epoch, in eval mode."""
        super().run()
        return self.selector


def _there(batch: TensorDictBase) -> Tensor:
    """Which sequences of the groups there are, bool [P, G]: of live draws all."""
    reward = batch["next", "reward"]
    found: Tensor = batch.get("group_mask", torch.ones_like(reward, dtype=torch.bool))
    return found
