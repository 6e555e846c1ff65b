"""Simulated profiles of different kinds, on which policies are compared where their strengths differ.

One generative model makes all of them; a kind is a set of its parameters. Its profiles are called `simulated-<kind>`,
so that no report can pass them off as measured. For sample i and configuration c:

- Latents z_i ~ N(0, I). What matters about a sample is g_i = √(1 − hidden)·(√(1 − bend)·z_i + √bend·u[cell of z_i]) +
  √hidden·h_i. The first part is linear in z_i. The second is constant within the cells that the signs of three latents
  make, with mean 0 and covariance I over the cells. h_i ~ N(0, I) shows in no feature.
- Compute p_c ∈ [0, 1] is a weighted mean over the knobs of the position of the knob's value among its values; vectors
  e_c and f_c, for accuracy and latency, come from the values of the knobs and, a little, from their combination.
- Accuracy is sigmoid(base + gain·(saturating(p_c) − its mean) + difficulty·d_i + interaction·g_i·e_c + noise), or a
  0/1 draw with this probability; d_i is a projection of g_i.
- Latency is exp(ln `BASE_MS` + range·p_c + size·s_i + interaction·g_i·f_c + noise); s_i is another projection of g_i.
- A feature reads one or two latents and noise; some are folded, some heavy-tailed, all in arbitrary units.

A larger simulation with the same kind and seed begins with the samples of a smaller one.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.envs.simulated.settings import SimulatedConfig
from knobwise.envs.tables.profile_table import Knob, ProfileTable

LATENTS = 6
BASE_MS = 20.0
COLUMN_SHAPES = (0.6, 0.2, 0.2)
"""Shares of feature columns that are plain, folded (absolute value), and exponentiated (heavy-tailed)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind. Effects on accuracy are in logits, effects on latency in its natural logarithm."""

    question: str  # what the kind stands for, and the question it puts to a policy
    samples: int  # unless the config sets the number
    knobs: tuple[Knob, ...]  # a larger number is more compute; names have no order
    configurations: int | None = None  # how many of the combinations of knob values exist; None for all
    unprofiled: float = 0.0  # share of cells that were not profiled, at random

    blocks: tuple[tuple[str, int], ...] = (("features", 24),)  # name and width of each feature block
    signal: float = 0.9  # share of the variance of an informative column that comes from the latents
    informative: float = 0.6  # share of columns that are informative; the others are noise
    missing: float = 0.0  # share of feature values that are missing, all of them in one third of the columns
    bend: float = 0.4  # share of the visible part that is piecewise constant in the latents, not linear
    hidden: float = 0.15  # share of the variance of what matters about a sample that shows in no feature

    labels: bool = False  # accuracy is a draw of 0 or 1 instead of a quality
    base: float = 0.5  # logit of the accuracy of an average sample under an average configuration
    gain: float = 2.0  # logits between the least and the most compute, for an average sample
    difficulty: float = 1.0  # standard deviation of how hard samples are for all configurations alike
    accuracy_interaction: float = 1.5  # standard deviation of how well a configuration suits a sample
    accuracy_noise: float = 0.3  # standard deviation of the noise in each cell

    latency_range: float = 2.0  # ln of the latency at the most compute over that at the least
    size: float = 0.5  # standard deviation of how slow samples are under all configurations alike
    latency_interaction: float = 0.3  # standard deviation of how slow a configuration is for a sample
    latency_noise: float = 0.1  # scale of the noise in each cell
    tail: float | None = None  # degrees of freedom if that noise is Student t; None for normal noise


def knobs_of(values: dict[str, Any]) -> tuple[Knob, ...]:
    """Knobs from their values by name; a number instead of values stands for so many names without an order."""
    knobs = []
    for name, known in values.items():
        names = [f"{name}-{i + 1:02d}" for i in range(known)] if isinstance(known, int) else known
        knobs.append(Knob(name, tuple(names)))
    return tuple(knobs)


def full_grid(knobs: tuple[Knob, ...]) -> NDArray[np.int64]:
    """All combinations of the knobs' values, int64 [C, K]: the index of each value; the last knob runs fastest."""
    sizes = [len(knob.values) for knob in knobs]
    return np.indices(sizes).reshape(len(sizes), -1).T.copy()


_TABLES = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
KINDS = {name: Kind(**table | {"knobs": knobs_of(table["knobs"])}) for name, table in _TABLES.items()}
"""The kinds by name."""


def simulate(config: SimulatedConfig) -> ProfileTable:
    """Draw a profile of a kind; the same config gives the same table. Raises InputError for an unknown kind, or fewer
    than one sample."""
    one_of("profile.kind", config.kind, KINDS)
    kind = KINDS[config.kind]
    n = kind.samples if config.samples is None else config.samples
    if n < 1:
        raise InputError(f"profile.samples={n}: must be at least 1")
    # a stream for each quantity that is drawn per sample, so that more samples leave the first ones unchanged
    streams = np.random.default_rng(config.seed).spawn(9)
    system, latents, unseen, for_accuracy, for_labels, for_latency, holes, *for_features = streams

    grid = _combinations(kind, system)
    compute = _compute(kind.knobs, grid, system)
    z = latents.standard_normal((n, LATENTS))
    of_cell = system.standard_normal((8, LATENTS))
    of_cell = np.linalg.qr(of_cell - of_cell.mean(0)).Q * np.sqrt(8)
    visible = np.sqrt(1 - kind.bend) * z + np.sqrt(kind.bend) * of_cell[(z[:, :3] > 0) @ (4, 2, 1)]
    matters = np.sqrt(1 - kind.hidden) * visible + np.sqrt(kind.hidden) * unseen.standard_normal(z.shape)
    projections = system.standard_normal((LATENTS, 2))
    difficulty, size = (matters @ (projections / np.linalg.norm(projections, axis=0))).T[:, :, None]

    quality = 1 - np.exp(-3 * compute)
    logit = kind.base + kind.gain * (quality - quality.mean()) / (1 - np.exp(-3)) + kind.difficulty * difficulty
    logit = logit + kind.accuracy_interaction * matters @ _vectors(kind.knobs, grid, system).T
    shape = logit.shape
    accuracy = 1 / (1 + np.exp(-logit - kind.accuracy_noise * for_accuracy.standard_normal(shape)))
    if kind.labels:
        accuracy = for_labels.random(shape) < accuracy

    noise = for_latency.standard_normal(shape) if kind.tail is None else for_latency.standard_t(kind.tail, shape)
    log_latency = np.log(BASE_MS) + kind.latency_range * compute + kind.size * size
    log_latency = log_latency + kind.latency_interaction * matters @ _vectors(kind.knobs, grid, system).T
    latency_ms = np.exp(log_latency + kind.latency_noise * noise.clip(-30, 30))  # so that float32 holds the result

    mask = holes.random(shape) >= kind.unprofiled
    diagonal = np.arange(max(shape))
    mask[diagonal % shape[0], diagonal % shape[1]] = True  # every sample and every configuration keeps a cell
    return ProfileTable(
        name=f"simulated-{config.kind}",
        knobs=kind.knobs,
        configurations=torch.from_numpy(grid),
        accuracy=torch.from_numpy(np.where(mask, accuracy, np.nan)).float(),
        latency_ms=torch.from_numpy(np.where(mask, latency_ms, np.nan)).float(),
        mask=torch.from_numpy(mask),
        sample_ids=tuple(f"sample-{i:04d}" for i in range(n)),
        features=_features(kind, z, system, *for_features),
        notes=(f"simulated, not measured: kind {config.kind}, seed {config.seed}",),
    )


def _combinations(kind: Kind, generator: np.random.Generator) -> NDArray[np.int64]:
    """The combinations of knob values that exist, int64 [C, K]; every value occurs."""
    grid = full_grid(kind.knobs)
    if kind.configurations is None:
        return grid
    sizes = grid.max(0) + 1
    diagonal = np.stack([np.arange(max(sizes)) % size for size in sizes], 1)
    on_it = (grid[:, None] == diagonal).all(-1).any(1)
    first = np.lexsort((generator.random(len(grid)), ~on_it))[: kind.configurations]
    return grid[np.sort(first)]


def _compute(knobs: tuple[Knob, ...], grid: NDArray[np.int64], generator: np.random.Generator) -> Floats:
    """Compute p of each configuration, [C], in 0..1. Numbers are ordered by compute, names are not."""
    total = np.zeros(len(grid))
    weights = generator.uniform(0.5, 1.0, len(knobs))
    for k, knob in enumerate(knobs):
        place = np.linspace(0, 1, len(knob.values))
        place = generator.permutation(place) if isinstance(knob.values[0], str) else place
        total += weights[k] / weights.sum() * place[grid[:, k]]
    return total


def _vectors(knobs: tuple[Knob, ...], grid: NDArray[np.int64], generator: np.random.Generator) -> Floats:
    """Which samples each configuration suits, [C, LATENTS], centred, with mean square length 1. A knob of numbers moves
    along one direction as its value grows; each value also has its own direction, and so, a little, each combination.
    """
    total = 0.3 * generator.standard_normal((len(grid), LATENTS))
    for k, knob in enumerate(knobs):
        values = generator.standard_normal((len(knob.values), LATENTS))
        direction = generator.standard_normal(LATENTS)
        if not isinstance(knob.values[0], str):
            values = 0.4 * values + np.linspace(-1.5, 1.5, len(values))[:, None] * direction
        total += values[grid[:, k]]
    total -= total.mean(0)
    return np.asarray(total / np.sqrt(np.square(total).sum(1).mean()))


def _features(
    kind: Kind, z: Floats, system: np.random.Generator, columns: np.random.Generator, gaps: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Feature blocks, float32 [n, d] each, NaN where missing."""
    width = sum(size for _, size in kind.blocks)
    weights = system.standard_normal((LATENTS, width))
    weights *= system.permuted(np.arange(LATENTS)[:, None] < system.integers(1, 3, width), axis=0)  # one or two each
    weights /= np.linalg.norm(weights, axis=0)
    signal = np.where(system.permutation(width) < kind.informative * width, kind.signal, 0.0)
    form = system.choice(len(COLUMN_SHAPES), width, p=COLUMN_SHAPES)
    unit, offset = 10 ** system.uniform(-1, 3, width), system.standard_normal(width)
    gappy = 3 * system.permutation(width) < width

    read = np.sqrt(signal) * (z @ weights) + np.sqrt(1 - signal) * columns.standard_normal((len(z), width))
    values = unit * np.choose(form, [read + offset, np.abs(read), np.exp(1.5 * read)])
    values[gaps.random(values.shape) < 3 * kind.missing * gappy] = np.nan
    joined = torch.from_numpy(values).float()
    return dict(zip([name for name, _ in kind.blocks], joined.split([size for _, size in kind.blocks], 1), strict=True))
