"""Several processes that draw for the GRPO of one training.

Each process has a bandit of its own and a copy of the policy, which gets the weights before each
iteration. Contexts and draws follow from seed, process and iteration alone: a training that was
stopped goes on with the same numbers.
"""

from __future__ import annotations

import functools
import os
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import MultiSyncCollector
from torchrl.weight_update import SharedMemWeightSyncScheme

from knobwise.agents.controller.actor import Actor, collect
from knobwise.agents.controller.controller import Controller
from knobwise.common.errors import InputError
from knobwise.common.interruption import SIGNALS, end_with
from knobwise.envs.bandit.torchrl_env import ConfigBandit


class NumberedBandit(ConfigBandit):
    """A bandit in a process of its own, whose resets are numbered.

    Args:
        first: the number of the first reset.
        seed: seed and number decide which contexts come, and what the process draws for them.
        arguments, settings: as in `ConfigBandit`.
    """

    def __init__(self, *arguments: Any, first: int, seed: str, **settings: Any) -> None:
        super().__init__(*arguments, seed=0, **settings)
        self.number = first
        self.seed_words = seed

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        seed = zlib.crc32(f"{self.seed_words} {self.number}".encode())
        self.number += 1
        self.contexts.generator.manual_seed(seed)
        torch.manual_seed(seed)
        return super()._reset(tensordict, **kwargs)


class DrawingPolicy(TensorDictModuleBase):
    """What a process decides by: it draws a group for each context, and notes the log-probs of the
    draws under the policy and under its reference."""

    def __init__(self, actor: Actor, controller: Controller, reference: Controller) -> None:
        super().__init__()
        self.in_keys = list(actor.in_keys)
        self.out_keys = ["action"]
        self.actor = actor
        self.controller = controller
        self.reference = reference

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        policies = {"action_log_prob": self.controller, "reference_log_prob": self.reference}
        return collect(self.actor, tensordict, policies)


def _begin(starter: int) -> None:
    """Leave signals to the trainer, which saves first, and end with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with(starter)


class SideBySide:
    """Takes the place of a trainer's collector: several processes draw in the stage of GRPO.

    Args:
        trainer: the trainer of a controller, whose last stage is GRPO on draws.
        count: the number of processes.

    Raises:
        InputError: the loss weighs all configurations or has a critic, contexts cannot be divided
            evenly, or the training is on a GPU.
    """

    def __init__(self, trainer: Any, count: int) -> None:
        setup = trainer.setup
        contexts = setup.settings.contexts
        self.trainer = trainer
        self.count = count
        self.alone = trainer.collector
        problem = ""
        if setup.loss.objective != "sampled":
            problem = f"loss.objective={setup.loss.objective}: only draws (loss=sampled) are shared"
        elif setup.device.type != "cpu":
            problem = f"device={setup.device}: several processes draw on the CPU only"
        elif contexts % count:
            problem = f"optimiser.contexts={contexts} cannot be divided among them evenly"
        if problem:
            raise InputError(f"collectors={count}: {problem}")

    def __iter__(self) -> Iterator[None]:
        trainer = self.trainer
        stream = iter(self.alone)
        while trainer.stage is not trainer.stages[-1]:
            yield next(stream)
        collector = None
        try:
            collector = self._start()
            batches = iter(collector)
            # before the first draws TorchRL draws something of its own, so they are not used
            next(batches)
            while True:
                collector.update_policy_weights_()
                trainer.buffer.extend(self.alone.postproc(next(batches)))
                yield
        except InputError:
            raise
        # TorchRL finds that a process is gone, and then perhaps that another cannot be closed
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"collectors={self.count}: a process that draws was ended, perhaps for want of "
                "memory; repeat the command to go on"
            ) from error
        finally:
            if collector is not None:
                collector.shutdown(raise_on_error=False)

    def _start(self) -> Any:
        """Start the processes, with the present weights."""
        trainer = self.trainer
        setup = trainer.setup
        contexts = setup.settings.contexts * setup.networks
        # one more batch than there are iterations
        arguments = {"batch_size": contexts // self.count, "first": trainer.state.iteration - 1}
        environments = []
        for number in range(self.count):
            seed = f"{trainer.seed} {number}"
            made = setup.bandit
            maker = functools.partial(
                NumberedBandit, *made.args, **made.keywords, **arguments, seed=seed
            )
            environments.append(maker)
        return MultiSyncCollector(
            environments,
            DrawingPolicy(setup.actor, setup.controller, setup.reference),
            frames_per_batch=contexts,
            total_frames=-1,
            cat_results=0,
            use_buffers=True,
            trust_policy=True,
            num_threads=torch.get_num_threads(),
            num_sub_threads=1,
            weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
            init_fn=functools.partial(_begin, os.getpid()),
            auto_register_policy_transforms=False,
        )

    def reset(self) -> None:
        """Have the trainer's own collector begin anew."""
        self.alone.reset()

    def shutdown(self) -> None:
        """End the trainer's own collector; the processes end with the iterator."""
        self.alone.shutdown()
