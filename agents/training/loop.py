"""The training loop that controller and selector share, on TorchRL's Collector and ReplayBuffer.

A training is a list of stages. In each iteration of a stage the collector draws contexts and lets
the behaviour policy decide; the buffer takes row numbers, actions, log-probs and rewards (no
features); the stage's loss goes over it in minibatches; the optimiser steps. Old log-probs are
those of the moment of collection: the policy never moves further from its own data than `epochs`
passes over it.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase

from knobwise.agents.checkpoint import Loaded, load_if_whole, save_checkpoint
from knobwise.agents.evaluation.evaluation import LOGGED
from knobwise.agents.training.seeding import random_state, seeded, set_random_state
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.agents.training.stage import Log, Stage
from knobwise.common.errors import InputError
from knobwise.common.interruption import Held, held_back
from knobwise.common.progress import progress, say
from knobwise.envs.demonstrations.beam_table import BeamTable
from knobwise.envs.tables.profile_table import ProfileTable, Split
from knobwise.losses.dropout import dropping_out

PREVIOUS = "previous.pt"
"""The `last.pt` before the present one."""
NOTHING: dict[str, Any] = {"score": -math.inf, "iteration": -1, "state": None, "by_sample": None}
"""The best evaluation before there is any."""
STOPPING = "stopping after this iteration, which will be saved; interrupt again to stop at once"


class Trainer(ABC):
    """Trains one agent with one seed, stage by stage.

    Args:
        table: what is learned from.
        split: which rows of the table are fitted on, and which judge.
        settings: the optimiser, and how often it is judged.
        seed: seed of the initialisation, the contexts and the draws.
        folder: where `best.pt`, `last.pt` and `previous.pt` are written; None for nowhere.
        log: where metrics go; None for nowhere.
        device: `cpu` or `cuda`.

    Attributes:
        iteration: the number of iterations that are done, or left out where a stage ended early.
        finished: True at the end; then nothing is learned any more.
        best: score, iteration, weights (`state`) and metrics of the best evaluation, and its score
            of each held-out sample if `_judge` notes them.
        scores: iteration and score of every evaluation.
        logged: the logged metrics by iteration, so that `metrics.csv` can be written again.
        actions: how many were drawn since the speed was last logged.
        seconds: how long the iterations since then took.
        saved: the iteration that `last.pt` holds.
        reward_spread: how much the rewards of a context typically differ on the training samples,
            measured where a stage that learns from rewards begins, or as the settings say; the unit
            of whatever is relative to rewards.
    """

    kept: tuple[str, ...] = ("iteration", "finished", "best", "scores", "logged", "reward_spread")
    """The attributes that a resumed training goes on from."""
    stateful: tuple[str, ...] = ("learned", "reference", "optimiser")
    """The attributes whose `state_dict` it goes on from too."""
    keeps_epochs = False
    """True to keep the agent of every evaluation, in a file of its own."""
    judged_by: str
    """The score that `_judge` returns, in a word."""
    trained_on: str
    """The words of the error message for a checkpoint of another training."""
    best = NOTHING
    iteration = 0
    finished = False
    actions = 0
    seconds = 0.0
    saved: int | None = None
    _held: Held
    by_sample: torch.Tensor | None = None
    """The scores of held-out samples in the latest evaluation, where they are noted."""

    def __init__(
        self,
        table: ProfileTable | BeamTable,
        split: Split,
        settings: OptimiserConfig,
        *,
        seed: int = 0,
        folder: Path | None = None,
        log: Log | None = None,
        device: str = "cpu",
    ) -> None:
        self.table: Any = table
        self.split = split
        self.settings = settings
        self.seed = seed
        self.folder = folder
        self.log = log
        self.device = torch.device(device)
        self.title = f"seed {seed}"
        # where the training stands
        self.scores = list[tuple[int, float]]()
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.reward_spread: float | None = None

    def _assemble(
        self,
        agent: nn.Module,
        reference: nn.Module,
        env: EnvBase,
        behaviour: Callable[..., TensorDictBase],
        stages: list[Stage],
        identity: object,
        stored: Collection[Any],
        shape: tuple[int, ...],
        critic: nn.Module | None = None,
    ) -> None:
        """Take over what is trained and what it is trained with; to be called inside `seeded`.

        Args:
            agent: the network to train, in eval mode.
            reference: the policy that the KL is taken to.
            env: where contexts and rewards come from.
            behaviour: the policy that collects.
            stages: one after the other.
            identity: what a checkpoint must agree with to be resumed, beside the data.
            stored: the collected keys that go into the buffer.
            shape: the shape of a batch of contexts in the buffer.
            critic: a value network that learns along with the agent, or None.
        """
        self.agent: Any = agent
        self.learned = agent
        if critic is not None:
            self.learned = nn.ModuleList([agent, critic])
        self.reference = reference
        self.env = env
        self.stages = stages
        self.total = 0
        for stage in stages:
            stage.start = self.total
            self.total = stage.end
        self.identity = repr(identity)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(shape[0], device=self.device),
            sampler=SamplerWithoutReplacement(),
            batch_size=shape[0],
        )
        self.collector = Collector(
            env,
            behaviour,
            replay_buffer=self.buffer,
            extend_buffer=True,
            # an episode is a single step, so the time axis is dropped
            postproc=lambda data: (
                data.squeeze(-1).select(*stored, strict=False).unflatten(0, shape)
            ),
            frames_per_batch=math.prod(shape),
            total_frames=-1,
            trust_policy=True,
            use_buffers=False,
            track_traj_ids=False,
            auto_register_policy_transforms=False,
        )
        self.optimiser = stages[0].optimiser(self.learned)
        self._random = random_state(self.device)

    @abstractmethod
    def _judge(self) -> tuple[float, Mapping[str, float]]:
        """Return the agent's score on held-out data, higher is better, and metrics to log."""

    def _is_better(self, score: float, metrics: Mapping[str, float]) -> bool:
        """Return True if weights with these results of `_judge` replace the kept ones."""
        return score > self.best["score"]

    @abstractmethod
    def _metrics(self, data: TensorDictBase) -> dict[str, float]:
        """Return metrics of collected contexts, to log beside the outputs of the loss."""

    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return how the agent was trained, to be stored in `best.pt`."""

    @property
    def trained(self) -> Any:
        """The trained agent, which is saved and which `run` returns."""
        return self.agent

    def stage_at(self, iteration: int) -> Stage:
        """Return the stage that an iteration is in; after the end the last one."""
        return next((stage for stage in self.stages if iteration < stage.end), self.stages[-1])

    @property
    def stage(self) -> Stage:
        """The stage of the present iteration."""
        return self.stage_at(self.iteration)

    @property
    def evaluates(self) -> bool:
        """True if the agent is evaluated, and metrics are logged, in this iteration."""
        return self.iteration % self.settings.evaluate_every == 0

    @property
    def epoch(self) -> int:
        """The number of intervals between evaluations that are done."""
        return self.iteration // self.settings.evaluate_every

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
        stream = iter(self.collector)
        try:
            with (
                held_back(self.folder is not None, notice) as self._held,
                seeded(self.seed, self.device),
                progress(self.title, self.total, self.iteration) as tick,
            ):
                set_random_state(self._random, self.device)
                while True:
                    # evaluation and saving: keep the best, end a stage that is past its peak
                    self.finished |= self.iteration == self.total
                    if self.finished or self.evaluates:
                        self._evaluate()
                    if self.finished:
                        break

                    # a signal stops the training here, with this iteration saved
                    if self._held.number is not None:
                        self._save()
                        self._held.check()

                    # training: collect a batch of contexts and learn from it
                    stage = self.stage
                    if self.iteration == stage.start:
                        stage.begin()
                        self.optimiser = stage.optimiser(self.learned)
                    start = time.perf_counter()
                    metrics = self.iterate(stream)
                    self.seconds += time.perf_counter() - start
                    if metrics:
                        self._note(metrics, self._speed())
                    note = stage.name
                    if self.best["state"] is not None:  # none yet where the heads have just begun
                        note += f" · best {self.judged_by} {self.best['score']:.4f}"
                    tick(self.iteration + 1, note)
                    self.iteration += 1
        except KeyboardInterrupt as stop:
            stop.add_note(self._what_is_saved())
            raise
        self.collector.shutdown()
        self.agent.load_state_dict(self.best["state"])
        self.agent.eval()
        return self.trained

    def iterate(self, stream: Iterator[None]) -> Mapping[str, float]:
        """Collect a batch of contexts, learn from it, and return the metrics to log."""
        stage = self.stage
        watched = self._watched
        stage.prepare(stage.share(self.iteration), watched)
        data = None
        if stage.draw is None or watched:
            self.buffer.empty()
            next(stream)
            data = self.buffer[:]
            self.actions += data["next", "reward"].numel()
        return self._learn(data)

    def _speed(self) -> dict[str, float]:
        """Return the actions per second since the last call."""
        speed = {"Train/Actions_Per_Second": self.actions / self.seconds}
        self.actions = 0
        self.seconds = 0.0
        return speed

    @property
    def _watched(self) -> bool:
        """True if the loss should compute its diagnostics in this iteration."""
        return self.evaluates or bool(self.stage.kl_controls)

    def _minibatches(self) -> Iterator[TensorDictBase]:
        """Return the minibatches of an epoch, from the buffer or as the stage draws them."""
        size = self.settings.minibatch
        contexts = self.settings.contexts
        draw = self.stage.draw
        if draw is None:
            return iter(self.buffer.sample().split(size))
        return (draw(min(size, contexts - first)) for first in range(0, contexts, size))

    def _learn(self, data: TensorDictBase | None) -> Mapping[str, float]:
        """Learn from freshly collected contexts, or from drawn ones, and return the metrics to
        log."""
        stage = self.stage
        watched = self._watched
        rate = stage.learning_rate(self.iteration, self.settings)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        parameters = [*self.learned.parameters()]
        outputs: list[TensorDictBase] = []
        for _ in range(self.settings.epochs):
            for minibatch in self._minibatches():
                # outputs without a gradient are diagnostics; the others add up to the loss
                with dropping_out(stage.dropout):
                    out = stage.loss(minibatch)
                total: Any = sum(value for value in out.values() if value.requires_grad)
                self.optimiser.zero_grad()
                total.backward()
                norm = nn.utils.clip_grad_norm_(parameters, stage.clip_grad)
                self.optimiser.step()
                if watched:
                    outputs.append(out.detach().set("loss", total.detach()).set("grad_norm", norm))
        if not outputs:
            return {}
        mean: TensorDictBase = lazy_stack(outputs).mean(0)
        metrics: dict[str, float] = {}
        if self.evaluates and data is not None:
            metrics = self._metrics(data)
            metrics |= {name: float(mean[key]) for key, name in LOGGED.items() if key in mean}
            metrics[stage.loss_name] = metrics.pop("Loss")
            metrics["LR"] = rate
            if self.reward_spread is not None:
                metrics["Reward_Spread"] = self.reward_spread
        # coefficients follow the KL of this iteration
        for control in stage.kl_controls:
            control.step(float(mean["kl_to_ref"]))
        return {f"Train/{name}": value for name, value in metrics.items()}

    # -- evaluation --------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """Judge on held-out data, keep the best, end the stage if it is time, and save."""
        score, metrics = self._judge()
        # a resumed training repeats its last evaluation, which counts once
        if not self.scores or self.scores[-1][0] < self.iteration:
            self.scores.append((self.iteration, score))
        kept = []
        if self.keeps_epochs:
            kept.append(f"epoch{self.epoch}.pt")
        if self._is_better(score, metrics):
            kept.append("best.pt")
            state = self.agent.state_dict()
            self.best = {
                "score": score,
                "iteration": self.iteration,
                "state": {name: value.detach().clone() for name, value in state.items()},
                "metrics": dict(metrics),
                "by_sample": self.by_sample,
            }
        # the stage ends when its score has not improved within `patience`
        stage = self.stage
        scores = [(score, -at) for at, score in self.scores if at > stage.start]
        patience = stage.patience * self.settings.evaluate_every
        if scores and 0 < patience <= self.iteration + max(scores)[1]:
            # true also where the later stages have no iterations
            self.finished = stage.end == self.total
            if not self.finished:
                self.iteration = stage.end
            # under this iteration a resumed training does not add it again
            self.scores[-1] = (self.iteration, self.scores[-1][1])
        self._note({f"Val/{name}": value for name, value in metrics.items()})
        self._save(kept)

    def _note(self, metrics: Mapping[str, float], speed: Mapping[str, float] | None = None) -> None:
        """Log metrics, and keep them for a resumed training; the speed is not kept."""
        if self.log is not None:
            numbers = {name: float(value) for name, value in metrics.items()}
            self.logged.append((self.iteration, numbers))
            self.log.log({**metrics, **(speed or {})}, self.iteration)

    # -- stopping and resuming ---------------------------------------------------------------------

    def _save(self, kept: Iterable[str] = ()) -> None:
        """Write files that keep the agent as it is, and `last.pt`, which a resumed training goes on
        from."""
        if self.folder is None:
            return
        with self._held.undisturbed():
            for name in kept:
                save_checkpoint(self.folder / name, self.trained, self.table, self.provenance())
            state = {"training": self.training_state()}
            loaded = Loaded(self.trained, self.table.name, self.table.digest, state)
            loaded.save(self.folder / "last.pt", self.folder / PREVIOUS)
            self.saved = self.iteration

    def _what_is_saved(self) -> str:
        """Return a note that tells the user what is on disk of this training."""
        if self.folder is None or self.saved is None:
            return f"{self.title}: nothing was saved yet"
        holds = f"holds iteration {self.saved:,} of {self.total:,}"
        return f"{self.title}: {self.folder / 'last.pt'} {holds}"

    def _coefficients(self) -> list[torch.Tensor]:
        """Return the coefficients of all stages that follow the KL."""
        return [control.coefficient for stage in self.stages for control in stage.kl_controls]

    def training_state(self) -> dict[str, Any]:
        """Return the state of the training, which `last.pt` holds beside the agent."""
        return {
            "identity": self.identity,
            **{name: getattr(self, name) for name in self.kept},
            **{name: getattr(self, name).state_dict() for name in self.stateful},
            "coefficients": list(map(float, self._coefficients())),
            "contexts": self.env.contexts.before,
            "random": random_state(self.device),
        }

    def resume(self, path: Path) -> bool:
        """Go on from a `last.pt`, or from the file before it if that is damaged.

        The training then ends bit for bit as it would have without the stop.

        Returns:
            False when there is no such file.

        Raises:
            InputError: the file belongs to another training.
        """
        loaded = load_if_whole(path) or load_if_whole(path.with_name(PREVIOUS))
        if loaded is None:
            return False
        state = loaded.extra.get("training", {})
        belongs_to = loaded.profile_digest, state.get("identity")
        if belongs_to != (self.table.digest, self.identity):
            raise InputError(f"{path}: was trained {self.trained_on}; choose another name=…")
        for name in self.kept:
            setattr(self, name, state[name])
        for name in self.stateful:
            getattr(self, name).load_state_dict(state[name])
        for coefficient, value in zip(self._coefficients(), state["coefficients"], strict=True):
            coefficient.fill_(value)
        self.env.contexts.set_back(state["contexts"])
        self.collector.reset()
        self._random = state["random"]
        self.saved = self.iteration
        # an unfinished training evaluates, and logs, its saved iteration again
        if not self.finished:
            self.logged = [row for row in self.logged if row[0] < self.iteration]
        # if best.pt is gone, write it again as it was at its iteration, and start over
        best = path.with_name("best.pt")
        kept = self.best["state"] is not None  # nothing yet where the heads have just begun
        if kept and load_if_whole(best) is None:
            self.iteration = self.best["iteration"]
            self.scores = [entry for entry in self.scores if entry[0] <= self.iteration]
            self.agent.load_state_dict(self.best["state"])
            save_checkpoint(best, self.trained, self.table, self.provenance())
            return self.resume(path)
        if not self.finished:
            say(f"{self.title}: goes on from iteration {self.iteration:,} of {self.total:,}")
        return True
