"""Simulated profiles of different kinds, on which ways of choosing are compared where their strengths differ.

One generative model makes all of them; a kind is a set of its parameters. What comes out is called `simulated-<kind>`,
so that no report can pass it off as measured. For sample i and configuration c:

- Latents z_i ~ N(0, I). What matters of a sample is g_i = √(1 − hidden)·(√(1 − bend)·z_i + √bend·u[cell of z_i]) +
  √hidden·h_i. The first part is linear in z_i; the second is constant within the cells that the signs of three latents
  make, of mean 0 and covariance I over the cells; h_i ~ N(0, I) is what no feature shows.
- Compute p_c ∈ [0, 1] is a weighted mean over the knobs of the place of the knob's value among its values; vectors e_c
  and f_c for accuracy and latency come from the values of the knobs, and a little from the combination.
- Accuracy is sigmoid(base + gain·(saturating(p_c) − its mean) + difficulty·d_i + interaction·g_i·e_c + noise), or a
  0/1 draw with this probability; d_i is a projection of g_i.
- Latency is exp(ln `BASE_MS` + range·p_c + size·s_i + interaction·g_i·f_c + noise); s_i is another projection of g_i.
- A feature reads one or two latents and noise; some are folded, some heavy-tailed, all in arbitrary units.

A larger simulation of a kind with the same seed begins with the samples of a smaller one (except that with fewer
samples than configurations some cells are profiled only so that every configuration has one).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import Knob, ProfileTable

LATENTS = 6
BASE_MS = 20.0
COLUMN_SHAPES = (0.6, 0.2, 0.2)
"""Shares of feature columns that are left as they are, folded (absolute value), and exponentiated (heavy-tailed)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind. Effects on accuracy are in logits, effects on latency in its natural logarithm."""

    question: str
    """What the kind stands for and what it asks of a policy."""
    samples: int
    """How many samples, unless the config says."""
    knobs: tuple[Knob, ...]
    """The knobs. More of a number is more compute; names are in no order."""
    configurations: int | None = None
    """How many of the combinations of knob values exist; None for all."""
    unprofiled: float = 0.0
    """Share of cells that were not profiled, at random."""

    blocks: tuple[tuple[str, int], ...] = (("features", 24),)
    """Feature blocks: name and width."""
    signal: float = 0.9
    """Share of the variance of an informative column that comes from the latents."""
    informative: float = 0.6
    """Share of columns that are informative; the others are noise."""
    missing: float = 0.0
    """Share of feature values that are missing, all of them in one third of the columns."""
    bend: float = 0.4
    """Share of what features can tell that is piecewise constant in the latents, not linear."""
    hidden: float = 0.15
    """Share of the variance of what matters of a sample that no feature shows."""

    labels: bool = False
    """Accuracy is 0 or 1, drawn, instead of a quality."""
    base: float = 0.5
    """Logit of the accuracy of an average sample under an average configuration."""
    gain: float = 2.0
    """Logits between least and most compute, for an average sample."""
    difficulty: float = 1.0
    """Standard deviation of what makes a sample hard for all configurations alike."""
    accuracy_interaction: float = 1.5
    """Standard deviation of what makes a configuration suit a sample."""
    accuracy_noise: float = 0.3
    """Standard deviation of what is left, cell by cell."""

    latency_range: float = 2.0
    """ln of latency with most over latency with least compute."""
    size: float = 0.5
    """Standard deviation of what makes a sample slow under all configurations alike."""
    latency_interaction: float = 0.3
    """Standard deviation of what makes a configuration slow for a sample."""
    latency_noise: float = 0.1
    """Scale of what is left, cell by cell."""
    tail: float | None = None
    """Degrees of freedom of that noise as Student t; None for normal."""


def _names(name: str, count: int) -> tuple[Knob, ...]:
    return (Knob(name, tuple(f"{name}-{i + 1:02d}" for i in range(count))),)


_GRID = (Knob("depth", (4, 8, 16, 32)), Knob("width", (64, 128, 256)), Knob("steps", (1, 2)))

KINDS: dict[str, Kind] = {
    "router": Kind(
        question="Twelve models without further knobs, right or wrong answers, telling features: how much of a high "
        "headroom does a policy get from noisy labels?",
        samples=1000,
        knobs=_names("model", 12),
        hidden=0.2,
        labels=True,
        accuracy_interaction=3.0,
        accuracy_noise=0.0,
        latency_range=2.5,
        size=0.6,
    ),
    "encoder": Kind(
        question="Three knobs of which a third of the combinations do not exist, a continuous quality: does a policy "
        "use what neighbouring configurations have in common?",
        samples=1300,
        knobs=(
            Knob("preset", (1, 2, 3, 4, 5, 6)),
            Knob("references", (1, 2, 4, 8, 16)),
            Knob("search", ("diamond", "hexagon", "star", "umh")),
        ),
        configurations=82,
        unprofiled=0.03,
        blocks=(("features", 40),),
        signal=0.6,
        bend=0.0,
        size=0.8,
    ),
    "portfolio": Kind(
        question="A portfolio of 37 solvers, few instances, running times over orders of magnitude, features that are "
        "skewed and in part missing: is there enough data to know which solver suits which instance?",
        samples=300,
        knobs=_names("solver", 37),
        unprofiled=0.05,
        blocks=(("features", 60),),
        missing=0.08,
        bend=0.7,
        hidden=0.1,
        latency_range=1.0,
        size=1.5,
        latency_interaction=1.2,
        latency_noise=0.3,
        tail=3.0,
    ),
    "noisy_labels": Kind(
        question="Right or wrong answers that a second draw would often turn round: does a policy average over the "
        "noise instead of learning it?",
        samples=800,
        knobs=_GRID,
        hidden=0.05,
        labels=True,
        accuracy_interaction=1.5,
    ),
    "heavy_tails": Kind(
        question="Latency that hardly depends on anything seen, with heavy tails: does a policy keep the margin that "
        "pays?",
        samples=600,
        knobs=_GRID,
        size=0.2,
        latency_interaction=0.1,
        latency_noise=0.4,
        tail=3.0,
    ),
    "weak_features": Kind(
        question="Much would suit one sample or another, but the features say little: does a policy take the little "
        "without believing the noise?",
        samples=600,
        knobs=_GRID,
        blocks=(("features", 40),),
        signal=0.1,
        informative=0.5,
    ),
    "few_samples": Kind(
        question="150 samples: what does a policy learn before it overfits?",
        samples=150,
        knobs=_GRID,
        blocks=(("features", 30),),
        missing=0.04,
    ),
    "low_headroom": Kind(
        question="Samples differ little in what suits them: does a policy gain the little there is, or lose?",
        samples=600,
        knobs=_GRID,
        base=1.0,
        accuracy_interaction=0.3,
        accuracy_noise=0.1,
        size=0.15,
        latency_interaction=0.05,
        latency_noise=0.05,
    ),
    "no_headroom": Kind(
        question="One configuration is the best for every sample at each budget, up to noise, and the features mean "
        "nothing: does a policy fall back to budget-aware static?",
        samples=500,
        knobs=_names("model", 10),
        signal=0.0,
        accuracy_interaction=0.0,
        accuracy_noise=0.3,
        size=0.0,
        latency_interaction=0.0,
        latency_noise=0.05,
    ),
    "unattainable": Kind(
        question="For most requests some configuration meets the budget, but jitter that nothing predicts decides "
        "which: does a policy say that 95 % cannot be reached?",
        samples=600,
        knobs=_GRID,
        latency_range=0.3,
        size=0.2,
        latency_interaction=0.1,
        latency_noise=0.8,
    ),
    "wide_knobs": Kind(
        question="240 configurations of three knobs, as a controller of a vision-language model has them, and feature "
        "blocks of image and text: does a policy find its way in a large space?",
        samples=800,
        knobs=(
            Knob("max_crops", (1, 2, 3, 4, 6, 9)),
            Knob("top_k", (1, 2, 3, 4, 5, 6, 7, 8)),
            Knob("num_active_blocks", (12, 15, 18, 21, 24)),
        ),
        blocks=(("image_features", 32), ("language_features", 48)),
        signal=0.95,
        bend=0.8,
        hidden=0.1,
        labels=True,
        difficulty=2.0,
        accuracy_interaction=2.0,
        accuracy_noise=0.0,
    ),
}
"""The kinds by name."""


@dataclass
class SimulatedConfig:
    """Which profile to simulate."""

    kind: str = "router"
    """Which kind; the keys of `KINDS`."""
    samples: int | None = None
    """How many samples; None for the kind's own number."""
    seed: int = 0
    """Of everything that is drawn."""


def simulate(config: SimulatedConfig) -> ProfileTable:
    """Draw a profile of a kind; the same config gives the same table.

    Raises:
        InputError: an unknown kind, fewer than one sample, a negative seed.
    """
    if config.kind not in KINDS:
        raise InputError(f"profile.kind={config.kind!r}: must be one of {', '.join(KINDS)}")
    kind = KINDS[config.kind]
    n = kind.samples if config.samples is None else config.samples
    if n < 1 or config.seed < 0:
        raise InputError(f"profile.samples={n}, profile.seed={config.seed}: at least one sample, and no negative seed")
    # one stream for each thing that is drawn per sample, so that more samples leave the first ones as they are
    streams = np.random.default_rng(config.seed).spawn(9)
    system, latents, unseen, for_accuracy, for_labels, for_latency, holes, *for_features = streams

    grid = _combinations(kind, system)
    compute = _compute(kind.knobs, grid, system)
    z = latents.standard_normal((n, LATENTS))
    of_cell = system.standard_normal((8, LATENTS))
    of_cell = np.linalg.qr(of_cell - of_cell.mean(0)).Q * np.sqrt(8)
    shown = np.sqrt(1 - kind.bend) * z + np.sqrt(kind.bend) * of_cell[(z[:, :3] > 0) @ (4, 2, 1)]
    matters = np.sqrt(1 - kind.hidden) * shown + np.sqrt(kind.hidden) * unseen.standard_normal(z.shape)
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
    latency_ms = np.exp(log_latency + kind.latency_noise * noise.clip(-30, 30))  # float32 holds what comes of it

    mask = holes.random(shape) >= kind.unprofiled
    kept = np.arange(max(shape))
    mask[kept % shape[0], kept % shape[1]] = True  # every sample and every configuration keeps a cell
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
    """The combinations of knob values that exist, int64 [C, K]; every value is in one of them."""
    sizes = [len(knob.values) for knob in kind.knobs]
    grid = np.array(list(itertools.product(*map(range, sizes))), dtype=np.int64)
    if kind.configurations is None:
        return grid
    diagonal = np.stack([np.arange(max(sizes)) % size for size in sizes], 1)
    on_it = (grid[:, None] == diagonal).all(-1).any(1)
    first = np.lexsort((generator.random(len(grid)), ~on_it))[: kind.configurations]
    return grid[np.sort(first)]


def _compute(knobs: tuple[Knob, ...], grid: NDArray[np.int64], generator: np.random.Generator) -> Floats:
    """Compute p of each configuration, [C], in 0..1. Numbers are in order of compute, names are not."""
    total = np.zeros(len(grid))
    weights = generator.uniform(0.5, 1.0, len(knobs))
    for k, knob in enumerate(knobs):
        place = np.linspace(0, 1, len(knob.values))
        place = generator.permutation(place) if isinstance(knob.values[0], str) else place
        total += weights[k] / weights.sum() * place[grid[:, k]]
    return total


def _vectors(knobs: tuple[Knob, ...], grid: NDArray[np.int64], generator: np.random.Generator) -> Floats:
    """What each configuration suits, [C, LATENTS], centred, of mean square length 1.

    A knob of numbers moves along one direction as its value grows; each value has a direction of its own besides, and
    so, a little, has each combination.
    """
    total = 0.3 * generator.standard_normal((len(grid), LATENTS))
    for k, knob in enumerate(knobs):
        own, direction = generator.standard_normal((len(knob.values), LATENTS)), generator.standard_normal(LATENTS)
        if not isinstance(knob.values[0], str):
            own = 0.4 * own + np.linspace(-1.5, 1.5, len(own))[:, None] * direction
        total += own[grid[:, k]]
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
