"""The training loop that controller and selector share, on TorchRL's Collector and ReplayBuffer.

A training is a list of stages. In each iteration of a stage the collector draws contexts and lets
the stage decide; the buffer takes row numbers, actions, log-probs and rewards (no features); the
stage's loss goes over it in minibatches; the optimiser steps. Old log-probs are those of the moment
of collection: the policy never moves further from its own data than `epochs` passes over it.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase

from knobwise.agents.training.checkpoint import Loaded, TrainingData, load_if_whole, save_checkpoint
from knobwise.agents.training.seeding import random_state, seeded, set_random_state
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import LOGGED, Log, Stage, StagePolicy, Validation
from knobwise.agents.training.state import Best, Provenance, TrainingState
from knobwise.common.errors import InputError
from knobwise.common.interruption import held_back
from knobwise.common.progress import progress, say
from knobwise.losses.dropout import dropping_out

PREVIOUS = "previous.pt"
"""The `last.pt` before the present one."""
STOPPING = "stopping after this iteration, which will be saved; interrupt again to stop at once"


class Trainer:
    """Trains one agent with one seed, stage by stage. To be made inside `seeded`.

    Args:
        agent: the network whose best weights are kept, in eval mode.
        stages: one after the other.
        env: where contexts and rewards come from.
        table: what is learned from; checkpoints note its name and digest.
        settings: the optimiser, and how often the agent is judged.
        shape: the shape of a batch of contexts in the buffer.
        reads: the keys of a context that stages decide by.
        validate: judges the agent on held-out data; it is told whether metrics are logged.
        judged_by: the score of that, in a word.
        identity: what a checkpoint must agree with to be resumed, beside the data.
        trained_on: what a checkpoint of another run has, for the error message.
        provenance: returns how the agent was trained, to be stored in `best.pt`.
        setup: what the stages share, for whoever reads it.
        kept: the part of the agent that checkpoints hold; None for the agent.
        keeps_epochs: whether the agent of every evaluation is kept, in a file of its own.
        seed: seed of the initialisation, the contexts and the draws.
        folder: where `best.pt`, `last.pt` and `previous.pt` are written; None for nowhere.
        log: where metrics go; None for nowhere.
        device: `cpu` or `cuda`.

    Attributes:
        state: where the training stands.
        total: iterations of all stages.
        saved: the iteration that `last.pt` holds.
    """

    def __init__(
        self,
        agent: nn.Module,
        stages: Sequence[Stage],
        env: EnvBase,
        *,
        table: TrainingData,
        settings: OptimiserConfig,
        shape: tuple[int, ...],
        reads: Sequence[Any],
        validate: Callable[[bool], Validation],
        judged_by: str,
        identity: object,
        trained_on: str,
        provenance: Callable[[Trainer], Provenance],
        setup: Any = None,
        kept: nn.Module | None = None,
        keeps_epochs: bool = False,
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.agent: Any = agent
        self.kept: Any = agent if kept is None else kept
        self.setup = setup
        self.stages = list(stages)
        self.env = env
        self.table = table
        self.settings = settings
        self.validate = validate
        self.judged_by = judged_by
        self.trained_on = trained_on
        self.provenance = provenance
        self.keeps_epochs = keeps_epochs
        self.seed = seed
        self.folder = folder
        self.log = log
        self.device = torch.device(device)
        self.title = f"seed {seed}"
        self.saved: int | None = None
        self.total = _numbered(self.stages)
        # the collector draws contexts, lets the stage decide, and fills the buffer
        self.policy = StagePolicy(self.stages[0], reads)
        self.buffer = ReplayBuffer(
            # where the contexts are; a named device would have each batch copied there anew
            storage=LazyTensorStorage(shape[0], device="auto"),
            sampler=SamplerWithoutReplacement(),
            batch_size=shape[0],
        )
        stored = {key for stage in self.stages for key in stage.stored}
        self.collector = _collector(env, self.policy, self.buffer, stored, shape)
        self._drawn = math.prod(shape) * env.reward_spec.shape[-1]
        self.optimiser = self.stages[0].optimiser(self.stages[0].module)
        self.state = TrainingState(repr(identity), random=random_state(self.device))
        # since the speed was last logged
        self._actions = 0
        self._seconds = 0.0

    @property
    def stage(self) -> Stage:
        """The stage of the present iteration; after the end the last one."""
        iteration = self.state.iteration
        return next((stage for stage in self.stages if iteration < stage.end), self.stages[-1])

    @property
    def evaluates(self) -> bool:
        """True if the agent is evaluated, and metrics are logged, in this iteration."""
        return self.state.iteration % self.settings.evaluate_every == 0

    @property
    def epoch(self) -> int:
        """The number of intervals between evaluations that are done."""
        return self.state.iteration // self.settings.evaluate_every

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> Any:
        """Train to the end, or until the held-out score stops improving.

        With a folder, a signal stops training after the present iteration, which is saved.

        Returns:
            The best agent, in eval mode.

        Raises:
            KeyboardInterrupt: a signal stopped the training; a note says what is saved.
        """
        # only the main process prints the notice, however many train
        notice = STOPPING if multiprocessing.parent_process() is None else ""
        state = self.state
        stream = iter(self.collector)
        try:
            with (
                held_back(self.folder is not None, notice) as self._held,
                seeded(self.seed, self.device),
                progress(self.title, self.total, state.iteration) as tick,
            ):
                set_random_state(state.random, self.device)
                # what there is before anything is learned
                if not state.scores:
                    self._evaluate(self.stage)
                self._stop_if_interrupted()
                for stage in self.stages:
                    while state.iteration < stage.end and not state.finished:
                        if state.iteration == stage.first:
                            stage.start(self)
                            self.optimiser = stage.optimiser(stage.module)

                        # collect and learn
                        metrics = self._train_step(stage, stream)
                        if metrics:
                            self._log(metrics, self._speed())
                        tick(state.iteration + 1, self._progress_note(stage))
                        state.iteration += 1

                        # evaluate: keep the best, save, end a stage that is past its peak
                        if self.evaluates or state.iteration == stage.end:
                            self._evaluate(stage)
                        if not state.finished:
                            self._stop_if_interrupted()
        except KeyboardInterrupt as stop:
            stop.add_note(self._saved_progress())
            raise
        self.collector.shutdown()
        self.agent.load_state_dict(state.best.state)
        self.agent.eval()
        return self.kept

    def _train_step(self, stage: Stage, stream: Iterator[None]) -> dict[str, float]:
        """Collect a batch of contexts, learn from it, and return the metrics to log."""
        began = time.perf_counter()
        watched = self.evaluates or bool(stage.kl_controls)
        stage.prepare(stage.share(self.state.iteration), watched)
        self.policy.stage = stage

        # collect, also where a stage draws its own batches, to see how the policy does
        data = None
        if stage.collects or watched:
            self.buffer.empty()
            next(stream)
            self._actions += self._drawn
            if self.evaluates:
                data = self.buffer[:]

        # learn: several passes over the batch, in minibatches
        rate = stage.learning_rate(self.state.iteration)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        parameters = [*stage.module.parameters()]
        outputs: list[TensorDictBase] = []
        for _ in range(self.settings.epochs):
            for minibatch in stage.minibatches(self.buffer):
                # outputs without a gradient are diagnostics; the others add up to the loss
                with dropping_out(stage.dropout):
                    out = stage.loss(minibatch)
                terms = [value for value in out.values() if value.requires_grad]
                total = functools.reduce(torch.add, terms)
                for parameter in parameters:
                    parameter.grad = None
                total.backward()
                norm = nn.utils.clip_grad_norm_(parameters, stage.clip_grad)
                self.optimiser.step()
                if watched:
                    outputs.append(out.detach().set("loss", total.detach()).set("grad_norm", norm))

        # what is logged, and what follows from it
        metrics: dict[str, float] = {}
        if outputs:
            mean: TensorDictBase = lazy_stack(outputs).mean(0)
            if data is not None:
                metrics = stage.metrics(data)
                metrics |= {name: float(mean[key]) for key, name in LOGGED.items() if key in mean}
                if stage.logs_all:
                    others = {str(key): float(value) for key, value in mean.items()}
                    metrics |= {key: value for key, value in others.items() if key not in LOGGED}
                metrics[stage.loss_name] = metrics.pop("Loss")
                metrics["LR"] = rate
                if stage.reward_spread is not None:
                    metrics["Reward_Spread"] = stage.reward_spread
            stage.after(mean)
        self._seconds += time.perf_counter() - began
        return {f"Train/{name}": value for name, value in metrics.items()}

    def _speed(self) -> dict[str, float]:
        """Compute actions collected per second of training since the last call, without
        evaluations, and start counting anew."""
        speed = {"Train/Actions_Per_Second": self._actions / self._seconds}
        self._actions = 0
        self._seconds = 0.0
        return speed

    def _progress_note(self, stage: Stage) -> str:
        """Say for the progress bar which stage trains, and the score of the weights kept so far."""
        best = self.state.best
        if best.state is None:  # none yet where the heads have just begun
            return stage.name
        return f"{stage.name} · kept {self.judged_by} {best.score:.4f}"

    # -- evaluation --------------------------------------------------------------------------------

    def _evaluate(self, stage: Stage) -> None:
        """Judge on held-out data, keep the best, end the stage if it is time, and save."""
        state = self.state
        validation = stage.validate(self)
        state.scores.append((state.iteration, validation.score))
        kept = []
        if self.keeps_epochs:
            kept.append(f"epoch{self.epoch}.pt")
        if stage.is_better(validation, state.best):
            kept.append("best.pt")
            weights = self.agent.state_dict()
            state.best = Best(
                validation.score,
                state.iteration,
                {name: value.detach().clone() for name, value in weights.items()},
                dict(validation.metrics),
                validation.by_sample,
            )
        past = stage.is_past_its_peak(state.iteration, state.scores)
        # true also where the later stages have no iterations
        state.finished = state.iteration == self.total or (past and stage.end == self.total)
        if past and not state.finished:
            state.iteration = stage.end
        self._log(*validation.named())
        self._save(kept)

    def _log(self, metrics: Mapping[str, float], others: Mapping[str, Any]) -> None:
        """Log a row."""
        if self.log is not None:
            self.log.log({**metrics, **others}, self.state.iteration)
            self.state.rows += 1

    # -- stopping and resuming ---------------------------------------------------------------------

    def _stop_if_interrupted(self) -> None:
        """Stop here if a signal came, with this iteration saved."""
        if self._held.number is not None:
            self._save()
            self._held.check()

    def _save(self, kept: Iterable[str] = ()) -> None:
        """Write files that keep the agent as it is, and `last.pt`, which a resumed training goes on
        from."""
        if self.folder is None:
            return
        with self._held.undisturbed():
            for name in kept:
                save_checkpoint(self.folder / name, self.kept, self.table, self.provenance(self))
            training: Provenance = {"training": self.training_state().plain()}
            loaded = Loaded(self.kept, self.table.name, self.table.digest, training)
            loaded.save(self.folder / "last.pt", self.folder / PREVIOUS)
            self.saved = self.state.iteration

    def _saved_progress(self) -> str:
        """Return a note that tells the user what is on disk of this training."""
        if self.folder is None or self.saved is None:
            return f"{self.title}: nothing was saved yet"
        holds = f"holds iteration {self.saved:,} of {self.total:,}"
        return f"{self.title}: {self.folder / 'last.pt'} {holds}"

    def training_state(self) -> TrainingState:
        """Copy weights, optimiser, stages, contexts and random state from the live objects into the
        state that last.pt holds."""
        self.state.agent = self.agent.state_dict()
        self.state.optimiser = self.optimiser.state_dict()
        self.state.stages = [stage.state_dict() for stage in self.stages]
        self.state.contexts = self.env.contexts.before
        self.state.random = random_state(self.device)
        return self.state

    def resume(self, path: Path) -> bool:
        """Go on from a `last.pt`, or from the file before it if that is damaged.

        The training then ends bit for bit as it would have without the stop.

        Returns:
            False when there is no such file, or nothing was learned yet.

        Raises:
            InputError: the file belongs to another training, or to another version.
        """
        loaded = load_if_whole(path) or load_if_whole(path.with_name(PREVIOUS))
        if loaded is None:
            return False
        state = TrainingState.restored(loaded.extra.get("training", {}), path)
        belongs_to = loaded.profile_digest, state.identity
        if belongs_to != (self.table.digest, self.state.identity):
            raise InputError(f"{path}: is of a run with {self.trained_on}; choose another name=…")
        if state.iteration == 0 and not state.finished:
            return False  # it begins anew, with its first rows in metrics.csv
        self.state = state
        self.agent.load_state_dict(state.agent)
        for stage, part in zip(self.stages, state.stages, strict=True):
            stage.load_state_dict(part)
        self.optimiser = self.stage.optimiser(self.stage.module)
        # a stage that has not begun makes its own
        if state.iteration > self.stage.first:
            self.optimiser.load_state_dict(state.optimiser)
        self.env.contexts.set_back(state.contexts)
        self.collector.reset()
        self.saved = state.iteration
        # if best.pt is gone, write it again as it was at its iteration, and start over
        best = path.with_name("best.pt")
        kept = state.best.state is not None  # nothing yet where the heads have just begun
        if kept and load_if_whole(best) is None:
            state.iteration = state.best.iteration
            state.scores = [entry for entry in state.scores if entry[0] <= state.iteration]
            self.agent.load_state_dict(state.best.state)
            save_checkpoint(best, self.kept, self.table, self.provenance(self))
            return self.resume(path)
        if not state.finished:
            say(f"{self.title}: goes on from iteration {state.iteration:,} of {self.total:,}")
        return True


def _numbered(stages: Iterable[Stage]) -> int:
    """Tell each stage its first iteration, one after the other; return how many there are."""
    total = 0
    for stage in stages:
        stage.first = total
        total = stage.end
    return total


def _collector(
    env: EnvBase,
    policy: StagePolicy,
    buffer: ReplayBuffer,
    stored: Collection[Any],
    shape: tuple[int, ...],
) -> Collector:
    """Return what draws contexts, lets the policy decide, and fills the buffer.

    Args:
        stored: the keys that the buffer takes.
        shape: the shape of a batch of contexts in the buffer.
    """

    def arranged(data: TensorDictBase) -> TensorDictBase:
        # an episode is a single step, so the time axis is dropped
        (step,) = data.unbind(-1)
        values = {key: step.get(key, None) for key in stored}
        kept = {key: x.view(*shape, *x.shape[1:]) for key, x in values.items() if x is not None}
        return TensorDict(kept, shape)

    return Collector(
        env,
        policy,
        replay_buffer=buffer,
        extend_buffer=True,
        postproc=arranged,
        frames_per_batch=math.prod(shape),
        total_frames=-1,
        # else each batch is taken apart to be moved to where it is
        device=env.device,
        trust_policy=True,
        use_buffers=False,
        track_traj_ids=False,
        auto_register_policy_transforms=False,
    )
