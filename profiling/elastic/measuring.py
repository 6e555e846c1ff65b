"""Time the elastic model at every (sample, configuration), so that an interruption costs nothing.

Every number goes straight into a memory-mapped array: after a SIGKILL the finished measurements are on disk, and the
same call goes on with those that are missing. The order is random over samples *and* configurations, anew in every
repeat: with samples outermost, the drift of the machine would look like an effect of the sample.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.profiling.elastic.model import Configuration, ElasticVLM
from knobwise.profiling.elastic.scenes import ANSWER_TOKENS, FILLER, Scenes

_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Measurements:
    """What was measured, on disk: R repeats of N samples × C configurations; NaN where not measured yet."""

    total_ms: NDArray[np.float32]
    """[R, N, C] wall time from pixels to the last token. Written last: it marks a finished measurement."""
    prefill_ms: NDArray[np.float32]
    """[R, N, C] wall time from pixels to the first token."""
    cpu_ms: NDArray[np.float32]
    """[R, N, C] CPU time of the thread over the same span as `total_ms`."""
    tokens: NDArray[np.int8]
    """[N, C, 9] the answer as decoded in the latest repeat, filled up with the filler token."""
    changed: NDArray[np.int32]
    """[1] how many repeats gave another answer than the one before; 0 on a deterministic machine."""

    @classmethod
    def open(cls, folder: Path, repeats: int, samples: int, configurations: int) -> Measurements:
        """Open the arrays in ``folder``, or make them. Raises ``ValueError`` if they are there in other shapes."""
        shapes: dict[str, tuple[tuple[int, ...], type, float]] = {
            **dict.fromkeys(_TIMES, ((repeats, samples, configurations), np.float32, np.nan)),
            "tokens": ((samples, configurations, ANSWER_TOKENS), np.int8, FILLER),
            "changed": ((1,), np.int32, 0),
        }
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for name, (shape, dtype, empty) in shapes.items():
            path = folder / f"{name}.npy"
            if not path.exists():
                with written_whole(path) as temporary, temporary.open("wb") as file:
                    np.save(file, np.full(shape, empty, dtype), allow_pickle=False)
            arrays[name] = np.lib.format.open_memmap(path, mode="r+")
            if arrays[name].shape != shape:
                raise ValueError(f"{path} has shape {arrays[name].shape}, not {shape}; choose another folder")
        return cls(**arrays)

    @property
    def done(self) -> int:
        """Number of finished measurements, of R·N·C."""
        return int(np.isfinite(self.total_ms).sum())


_TIMES = ("total_ms", "prefill_ms", "cpu_ms")


def measure(
    model: ElasticVLM, samples: Sequence[Scenes], configurations: Sequence[Configuration], into: Measurements, seed: int
) -> None:
    """Measure what is missing in ``into``, at batch size 1 on one thread.

    Raises ``ValueError`` before anything is timed if the model cannot run one of the configurations.
    """
    for configuration in configurations:
        model.check(configuration)
    with one_thread():
        _measure(model, samples, configurations, into, seed)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on products this small more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(
    model: ElasticVLM, samples: Sequence[Scenes], configurations: Sequence[Configuration], into: Measurements, seed: int
) -> None:
    inputs = [(torch.from_numpy(s.images), torch.from_numpy(s.prompts)) for s in samples]
    for i in range(_WARM_UP_ROUNDS):
        for configuration in configurations:
            model.generate(*inputs[i % len(inputs)], configuration)
    total, done = into.total_ms.size, into.done
    # the collector would stop the clock at random cells; nothing here makes cycles
    collecting = gc.isenabled()
    gc.disable()
    try:
        with progress("measuring", total, done) as tick:
            for repeat in range(len(into.total_ms)):
                order = np.random.default_rng((seed, repeat)).permutation(len(samples) * len(configurations))
                for cell in order[np.isnan(into.total_ms[repeat].ravel()[order])]:
                    i, j = divmod(int(cell), len(configurations))
                    run = model.generate(*inputs[i], configurations[j])
                    tokens = run.tokens + [FILLER] * (ANSWER_TOKENS - len(run.tokens))
                    into.changed[0] += bool(repeat and np.any(into.tokens[i, j] != tokens))
                    into.tokens[i, j] = tokens
                    into.prefill_ms[repeat, i, j], into.cpu_ms[repeat, i, j] = run.prefill_ms, run.cpu_ms
                    into.total_ms[repeat, i, j] = run.total_ms
                    done += 1
                    if done % 64 == 0 or done == total:
                        tick(done, "")
    finally:
        if collecting:
            gc.enable()
        for name in (*_TIMES, "tokens", "changed"):
            array = getattr(into, name)
            if isinstance(array, np.memmap):
                array.flush()


def claim(path: Path, identity: dict[str, object]) -> None:
    """Note in ``path`` what is being measured; raise ``ValueError`` if something else was begun there before."""
    wanted = json.loads(json.dumps(identity))
    if not path.exists():
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps(wanted, indent=1))
        return
    found = json.loads(path.read_text())
    keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    if keys:
        other = "; ".join(f"{key}: {found.get(key)} → {wanted.get(key)}" for key in keys)
        raise ValueError(f"{path.parent} holds a run with other settings ({other}); choose another out folder")
