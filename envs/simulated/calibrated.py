"""Simulated profiles of a vision-language model with three knobs, calibrated to what was published about one.

The published numbers are from a mixture-of-experts model with 16 blocks on one GPU. The profiles follow them and are
called `simulated-…`: nothing was measured. For sample i of a data set and configuration c:

- Latents z_i ~ N(0, I₇): difficulty, size of the image, length of the text, length of the answer, and how much crops,
  experts and blocks matter for this sample.
- There are (crops + 1)·144 vision tokens, or up to 5 % fewer, depending on the size of the image. `max_crops` is the
  number of crops; a tier is a range of crops, and the size of the image decides which number in it.
- Vision time is a curve over crops, the only thing that is solved for: what the published totals leave for it. Prefill
  is `PREFILL_MS` times powers of vision tokens, text tokens, top_k and blocks, times noise, and rarely a stall. A
  decoding step takes 36–48 ms depending on blocks and top_k, at every position alike, times noise. The first token
  comes with the prefill, so that total = vision + prefill + (tokens − 1)·step.
- The answer is right if Φ⁻¹ of the configuration's mean accuracy + difficulty + the effect of knobs on this sample +
  noise is above 0, all scaled so that the mean is met. A right answer scores what the annotators agree on, as in VQA.
- Mean accuracy falls from the best published one by the cost of the removed blocks (`blocks_lost`); experts and crops
  share the rest of the way down to the worst published one.
- Features read the sizes, and the other latents as far as `signal` allows. No feature reads the noise of an outcome.

Two published numbers contradict each other: inside one configuration prefill varies by 18 %, but over all records of
the 240 configurations, with the configurations' own differences, by 16 %. They come from different runs; the effect of
the text length (`TEXT_EFFECT`) follows the first on tiers and the second elsewhere.

`python benchmarks/calibration.py` prints published and simulated numbers side by side.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from knobwise.common.errors import InputError
from knobwise.envs.simulated.settings import CalibratedConfig
from knobwise.envs.tables.profile_table import Knob, ProfileTable

Floats = NDArray[np.float64]

TOTAL_BLOCKS = 16
TIERS = {"low": (1, 3), "medium": (4, 8), "high": (9, 15)}
"""Fewest and most crops."""
GRIDS: dict[str, tuple[Knob, ...]] = {
    "240": (
        Knob("max_crops", (2, 4, 6, 8, 10, 12)),
        Knob("top_k", (4, 8, 12, 16, 20, 24, 28, 32)),
        Knob("num_active_blocks", (8, 10, 12, 14, 16)),
    ),
    "27": (Knob("max_crops", (2, 6, 10)), Knob("top_k", (4, 8, 12)), Knob("num_active_blocks", (12, 14, 16))),
    "tiers": (
        Knob("tier", tuple(TIERS)),
        Knob("top_k", (4, 5, 6, 7, 8)),
        Knob("num_active_blocks", (12, 13, 14, 15, 16)),
    ),
}


class DataSet(NamedTuple):
    """What was published about a data set, and choices for what was not."""

    worst: tuple[float, float]
    """Accuracy and mean total ms at the fast end of the Pareto front: tier low, top_k 4, 12 blocks."""
    best: tuple[float, float]
    """The same at its accurate end: tier `best_tier`, top_k 8, 16 blocks."""
    best_tier: str
    tokens: tuple[float, int, int]
    """Generated tokens: mean, least, most."""
    medium_loss: float
    """Accuracy lost with 6 crops as a share of that lost with 2 (chosen)."""
    high_loss: float
    """The same with 12 crops."""
    other_vision: float
    """Vision time of the other of medium and high, relative to that of `best_tier` (chosen)."""


DATA_SETS = {
    "text_vqa": DataSet((0.378, 218.6), (0.768, 371.5), "high", (3.4, 2, 15), 0.25, 0.0, 0.6),
    "coco_vqa": DataSet((0.654, 166.5), (0.826, 294.7), "medium", (2.2, 2, 6), 0.0, 0.3, 1.3),
    "okvqa": DataSet((0.366, 177.9), (0.644, 289.2), "medium", (2.4, 2, 8), 0.0, 0.2, 1.3),
}
"""The best tier of coco_vqa and the tokens of okvqa were not published. They are chosen so that the two, which show the
same images, have about the same vision time."""
BLOCK_LOSS: Floats = np.array(
    [0.627, 0.055, 0.051, 0.046, 0.039, 0.034, 0.031, 0.028, 0.027, 0.026, 0.026, 0.027, 0.030, 0.033, 0.037, 0.043]
)
"""Accuracy lost by removing one block. The value of block 0 was published, and no more can be lost."""
PREFILL_MS = 135.0
"""With `REFERENCE` tokens, experts and blocks."""
REFERENCE = {"vision": 1000.0, "text": 40.0, "top_k": 15.0, "blocks": 11.7}
VISION_EFFECT, EXPERT_EFFECT, BLOCK_EFFECT = 0.15, 0.08, 0.40
"""Exponents in the prefill time."""
TEXT_EFFECT = {"240": 0.18, "27": 0.18, "tiers": 0.37}
TEXT_SPREAD = 0.45
"""Standard deviation of the logarithm of text tokens."""
PREFILL_NOISE, STALLS, STALL = 0.046, 1e-4, 0.6
"""Standard deviation of the logarithm; share of records that stall; mean relative delay of a stall."""
STEP_NOISE = 0.193
LEVELS = ((0.3, 0.05), (0.6, 0.08), (0.9, 0.07), (1.0, 0.80))
"""Scores of a right answer, and how often each occurs."""
DIFFICULTY, SUITS, ANSWER_NOISE = 1.0, 0.8, 0.5
"""Standard deviations, before scaling."""
NEW_ANSWERS = 0.1
"""Share of records in which the length of the answer is drawn anew."""
COLUMN_NOISE = 2.0
"""Standard deviation of the noise in a feature column; a latent has 1."""


class Records(NamedTuple):
    """One data set, drawn: arrays [n, C] unless said otherwise; times in ms."""

    accuracy: Floats
    vision: Floats
    prefill: Floats
    step: Floats
    tokens: NDArray[np.int64]
    vision_tokens: NDArray[np.int64]
    text_tokens: NDArray[np.int64]
    """[n]."""
    features: dict[str, torch.Tensor]
    """Float32 [n, width] each."""

    @property
    def decode(self) -> Floats:
        return (self.tokens - 1) * self.step

    @property
    def total(self) -> Floats:
        return self.vision + self.prefill + self.decode


def simulate_calibrated(config: CalibratedConfig) -> ProfileTable:
    """Draw the profile. The same config gives the same table; a data set has the same samples whatever other data sets
    are drawn.

    Raises:
        InputError: for an unknown data set, grid or latency, no samples, a signal outside [0, 1], or negative numbers.
    """
    _check(config)
    drawn = {dataset: _draw(config, dataset) for dataset in config.datasets}
    time: Callable[[Records], Floats] = {
        "total": lambda r: r.total,
        "prefill": lambda r: r.prefill,
        "vision_prefill": lambda r: r.vision + r.prefill,
    }[config.latency]
    parts = list(drawn.values())
    n = config.samples
    accuracy = torch.from_numpy(np.concatenate([part.accuracy for part in parts], dtype=np.float32))
    return ProfileTable(
        name="simulated-" + "+".join(drawn),
        knobs=GRIDS[config.grid],
        configurations=torch.from_numpy(_configurations(config.grid)),
        accuracy=accuracy,
        latency_ms=torch.from_numpy(np.concatenate([time(part) for part in parts], dtype=np.float32)),
        mask=torch.ones_like(accuracy, dtype=torch.bool),
        sample_ids=tuple(map(str, range(n))) * len(parts),
        datasets=tuple(dataset for dataset in drawn for _ in range(n)) if len(parts) > 1 else (),
        features={name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features},
        notes=(f"simulated, not measured: calibrated to published numbers, grid {config.grid}, seed {config.seed}",),
    )


def calibrated_records(config: CalibratedConfig) -> pl.DataFrame:
    """The same draw with one row per (configuration, sample), and with the stages and tokens of record files.

    Columns: `dataset`, `sample_id`, the knobs, `accuracy`, `latency_ms` (the total), `vision_ms`, `prefill_ms`,
    `decode_ms`, `step_ms`, and `num_*_tokens` for vision, language, output and total. Name files with these records
    so that nobody takes them for measured.
    """
    _check(config)
    knobs, chosen = GRIDS[config.grid], _configurations(config.grid)
    frames = []
    for dataset in config.datasets:
        drawn = _draw(replace(config, image_width=0, language_width=0), dataset)
        n, c = drawn.accuracy.shape
        columns: dict[str, Any] = {
            knob.name: pl.Series(list(knob.values)).gather(np.repeat(chosen[:, k], n)) for k, knob in enumerate(knobs)
        }
        times = {"latency_ms": drawn.total, "vision_ms": drawn.vision, "prefill_ms": drawn.prefill}
        times |= {"decode_ms": drawn.decode, "step_ms": drawn.step}
        text = np.broadcast_to(drawn.text_tokens[:, None], (n, c))
        tokens = {"vision": drawn.vision_tokens, "language": text, "output": drawn.tokens}
        tokens["total"] = drawn.vision_tokens + text + drawn.tokens
        columns |= {"accuracy": drawn.accuracy.T.ravel()}
        columns |= {name: values.T.ravel().round(4) for name, values in times.items()}
        columns |= {f"num_{kind}_tokens": values.T.ravel() for kind, values in tokens.items()}
        frame = pl.DataFrame({"sample_id": np.tile(np.arange(n), c), **columns})
        frames.append(frame.select(pl.lit(dataset).alias("dataset"), pl.all()))
    return pl.concat(frames)


def blocks_lost(removed: tuple[int, ...]) -> float:
    """Accuracy lost by removing these blocks: less than the sum, and never more than for block 0 alone."""
    most = BLOCK_LOSS[0]
    return float(most * (1 - np.prod(1 - BLOCK_LOSS[list(removed)] / most)))


# -- one data set ------------------------------------------------------------------------------------------------------


def _check(config: CalibratedConfig) -> None:
    unknown = [name for name in config.datasets if name not in DATA_SETS]
    if unknown or not config.datasets or len(set(config.datasets)) < len(config.datasets):
        raise InputError(f"profile.datasets={list(config.datasets)}: must be some of {', '.join(DATA_SETS)}, each once")
    for name, known in (("grid", tuple(GRIDS)), ("latency", ("total", "prefill", "vision_prefill"))):
        if (value := getattr(config, name)) not in known:
            raise InputError(f"profile.{name}={value!r}: must be one of {', '.join(known)}")
    for name, least in (("samples", 1), ("image_width", 0), ("language_width", 0)):
        if (value := getattr(config, name)) < least:
            raise InputError(f"profile.{name}={value}: must be at least {least}")
    if not 0 <= config.signal <= 1:
        raise InputError(f"profile.signal={config.signal}: must be between 0 and 1")


def _configurations(grid: str) -> NDArray[np.int64]:
    """Int64 [C, 3]: the index of each knob's value."""
    return np.array(list(itertools.product(*(range(len(knob.values)) for knob in GRIDS[grid]))), dtype=np.int64)


def _draw(config: CalibratedConfig, dataset: str) -> Records:
    published, n = DATA_SETS[dataset], config.samples
    # a stream for each quantity, so that the widths of features change nothing else
    streams = np.random.default_rng([config.seed, zlib.crc32(dataset.encode())]).spawn(6)
    latents, for_prefill, for_steps, for_answers, for_lengths, for_features = streams
    z = latents.standard_normal((n, 7))
    _, size, text, length, *suits = z.T

    first, top_k, blocks = (
        np.array(k.values)[i] for k, i in zip(GRIDS[config.grid], _configurations(config.grid).T, strict=True)
    )
    if config.grid == "tiers":
        least, most = np.array([TIERS[tier] for tier in first]).T
        nominal = (least + most) / 2
        crops = (least + np.floor(ndtr(size)[:, None] * (most - least + 1))).clip(least, most)
    else:
        nominal = first.astype(np.float64)
        crops = np.broadcast_to(nominal, (n, len(nominal)))
    vision_tokens = np.rint((crops + 1) * 144 * (1 - 0.05 * ndtr(-size)[:, None])).astype(np.int64)
    text_tokens = np.rint(REFERENCE["text"] * np.exp(TEXT_SPREAD * text)).clip(4).astype(np.int64)
    shape = crops.shape

    noise = np.exp(PREFILL_NOISE * for_prefill.standard_normal(shape) - PREFILL_NOISE**2 / 2)
    noise *= 1 + (for_prefill.random(shape) < STALLS) * for_prefill.exponential(STALL, shape)
    effect = TEXT_EFFECT[config.grid]
    prefill = _prefill(vision_tokens, top_k, blocks) * (text_tokens / REFERENCE["text"])[:, None] ** effect * noise
    vision = _vision(published, effect)(nominal) * (crops + 1) / (nominal + 1)
    step = _step(top_k, blocks) * np.exp(STEP_NOISE * for_steps.standard_normal(shape) - STEP_NOISE**2 / 2)
    place = np.where(for_lengths.random(shape) < NEW_ANSWERS, for_lengths.random(shape), ndtr(length)[:, None])
    tokens = _lengths(*published.tokens)(place)

    # each knob scaled to −1 … 1; a sample gains or loses by it
    ranges = [(np.log1p(nominal), 2, 12), (np.log(top_k), 4, 32), (blocks, 8, 16)]
    scale: list[Callable[[Any], Any]] = [np.log1p, np.log, np.asarray]
    places = [2 * (v - f(a)) / (f(b) - f(a)) - 1 for (v, a, b), f in zip(ranges, scale, strict=True)]
    matters = SUITS * np.stack(places)
    spread = np.sqrt(DIFFICULTY**2 + np.square(matters).sum(0) + ANSWER_NOISE**2)
    agreed, often = np.array(LEVELS).T
    right = spread * ndtri(_mean_accuracy(published, nominal, top_k, blocks) / (agreed @ often))
    right = right + DIFFICULTY * z[:, :1] + np.stack(suits, 1) @ matters
    right = right + ANSWER_NOISE * for_answers.standard_normal(shape) > 0
    accuracy = right * for_answers.choice(agreed, (n, 1), p=often)
    features = _features(config, dataset, z, for_features)
    return Records(accuracy, vision, prefill, step, tokens, vision_tokens, text_tokens, features)


def _prefill(vision_tokens: NDArray[Any], top_k: NDArray[Any], blocks: NDArray[Any]) -> Floats:
    """Prefill time in ms at the reference text length."""
    inputs = {
        "vision": (vision_tokens, VISION_EFFECT),
        "top_k": (top_k, EXPERT_EFFECT),
        "blocks": (blocks, BLOCK_EFFECT),
    }
    factors = [(value / REFERENCE[name]) ** power for name, (value, power) in inputs.items()]
    return np.asarray(PREFILL_MS * factors[0] * factors[1] * factors[2])


def _step(top_k: NDArray[Any], blocks: NDArray[Any]) -> Floats:
    """Mean ms of a decoding step: 36 at the smallest values of both knobs, 48 at the largest."""
    return np.asarray(36 + 9 * (blocks - 8) / 8 + 3 * np.log(top_k / 4) / np.log(8))


def _vision(known: DataSet, text_effect: float) -> Callable[[Floats], Floats]:
    """Mean vision ms by the number of crops: what prefill and decoding leave of the published totals at 2 crops and at
    the crops of the best tier, linear in between, and 0 without an image."""
    longer = np.exp((text_effect * TEXT_SPREAD) ** 2 / 2)

    def left(total: float, crops: int, top_k: int, blocks: int) -> float:
        k, b = np.array(top_k), np.array(blocks)
        prefill = longer * _prefill(np.array((crops + 1) * 144 * 0.975), k, b)
        return float(total - prefill - (known.tokens[0] - 1) * _step(k, b))

    crops = {"medium": 6, "high": 12}
    best = left(known.best[1], crops[known.best_tier], 8, TOTAL_BLOCKS)
    times = {tier: best * (1 if tier == known.best_tier else known.other_vision) for tier in crops}
    curve = [0.0, left(known.worst[1], 2, 4, 12), times["medium"], times["high"]]
    return lambda nominal: np.interp(nominal, [-1, 2, 6, 12], curve)


def _mean_accuracy(known: DataSet, crops: Floats, top_k: NDArray[Any], blocks: NDArray[Any]) -> Floats:
    """Mean accuracy of each configuration, [C]."""
    cheapest = np.argsort(BLOCK_LOSS, kind="stable")
    by_blocks = np.array([blocks_lost(tuple(cheapest[:removed])) for removed in range(TOTAL_BLOCKS - 7)])
    left = known.best[0] - known.worst[0] - by_blocks[4]
    by_crops = np.interp(np.log1p(crops), np.log1p([2, 6, 12]), [1, known.medium_loss, known.high_loss])
    by_experts = ((8 - top_k).clip(0) / 4) ** 1.7 + 0.1 * np.log2(top_k.clip(8) / 8)
    return np.asarray(known.best[0] - by_blocks[TOTAL_BLOCKS - blocks] - left * (0.65 * by_crops + 0.35 * by_experts))


def _lengths(mean: float, least: int, most: int) -> Callable[[Floats], NDArray[np.int64]]:
    """Quantile function of a geometric distribution from `least` on, cut at `most`, with this mean."""
    counts = np.arange(most - least + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        chances = ratio**counts / (ratio**counts).sum()
        low, high = (ratio, high) if chances @ counts < mean - least else (low, ratio)
    edges = chances.cumsum()[:-1]
    return lambda place: least + np.searchsorted(edges, place, side="right")


def _features(
    config: CalibratedConfig, dataset: str, z: Floats, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Image features read difficulty, size and the usefulness of crops and blocks; language features read difficulty,
    both lengths and the usefulness of experts and blocks. All data sets share the encoder and differ by an offset."""
    visible = np.sqrt(config.signal) * z + np.sqrt(1 - config.signal) * generator.standard_normal(z.shape)
    visible[:, 1:3] = z[:, 1:3]
    blocks = {
        "image_features": (config.image_width, [0, 1, 4, 6]),
        "language_features": (config.language_width, [0, 2, 3, 5, 6]),
    }
    features = {}
    for number, (name, (width, which)) in enumerate(blocks.items()):
        if width:
            weights = np.random.default_rng([config.seed, number]).standard_normal(
                (len(which), width), dtype=np.float32
            )
            offset = np.random.default_rng([config.seed, number, zlib.crc32(dataset.encode())]).standard_normal(
                width, dtype=np.float32
            )
            block = visible[:, which].astype(np.float32) @ weights + 0.5 * offset
            block += COLUMN_NOISE * generator.standard_normal(block.shape, dtype=np.float32)
            features[name] = torch.from_numpy(block)
    return features
