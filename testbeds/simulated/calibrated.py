"""Simulated profiles of a vision-language model with three knobs, calibrated to published numbers.

The published numbers are from a mixture-of-experts model with 16 blocks on one GPU. The profiles
follow them and are called `simulated-…`: nothing was measured. For sample i of a data set and
configuration c:

- Latents z_i ~ N(0, I₇): difficulty, size of the image, length of the text, length of the answer,
  and how much crops, experts and blocks matter for this sample.
- There are (crops + 1)·144 vision tokens, or up to 5 % fewer, depending on the size of the image.
  `max_crops` is the number of crops; a tier is a range of crops, and the size of the image decides
  which number in it.
- Vision time is a curve over crops, the only thing that is solved for: what the published totals
  leave for it. Prefill is 135 ms times powers of vision tokens, text tokens, top_k and blocks,
  times noise, and rarely a stall. A decoding step takes 36–48 ms depending on blocks and top_k, at
  every position alike, times noise. The first token comes with the prefill, so that total = vision
  + prefill + (tokens − 1)·step.
- The answer is right if Φ⁻¹ of the configuration's mean accuracy + difficulty + the effect of knobs
  on this sample + noise is above 0, all scaled so that the mean is met. A right answer scores what
  the annotators agree on, as in VQA.
- Mean accuracy falls from the best published one by the cost of the removed blocks (`blocks_lost`);
  experts and crops share the rest of the way down to the worst published one.
- Features read the sizes, and the other latents as far as `signal` allows. No feature reads the
  noise of an outcome.

Two published numbers contradict each other: inside one configuration prefill varies by 18 %, but
over all records of the 240 configurations, with the configurations' own differences, by 16 %. They
come from different runs; the effect of the text length (`text_effect`) follows the first on tiers
and the second elsewhere.

tests/testbeds/simulated/test_calibrated.py compares simulated numbers with published ones.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from knobwise.common.checks import at_least, one_of, share
from knobwise.common.errors import InputError
from knobwise.envs.tables.profile_table import Knob, ProfileTable
from knobwise.envs.tables.tensor_file import joined_by_name
from knobwise.testbeds.simulated.published import (
    ANSWER_NOISE,
    BLOCK_LOSS,
    COLUMN_NOISE,
    DATA_SETS,
    DIFFICULTY,
    EFFECT,
    GRIDS,
    NEW_LENGTHS,
    PREFILL_MS,
    PREFILL_NOISE,
    REFERENCE,
    REFERENCE_TEXT,
    SCORES,
    SHARES,
    STALL,
    STALLS,
    STEP_NOISE,
    SUITS,
    TEXT_EFFECT,
    TEXT_SPREAD,
    TIERS,
    TOTAL_BLOCKS,
    DataSet,
)
from knobwise.testbeds.simulated.settings import SimulatedConfig

Array = NDArray[Any]


def simulate(config: SimulatedConfig) -> ProfileTable:
    """Draw the profile.

    Equal settings give equal tables, and a data set has the same samples whatever other data sets
    are drawn.

    Raises:
        InputError: an unknown data set, grid or latency, no samples, a signal outside [0, 1], or
            negative numbers.
    """
    _check(config)
    # one data set below the other
    parts = [_draw(config, dataset) for dataset in config.datasets]
    accuracies, times, blocks = zip(*parts, strict=True)
    n = config.samples
    accuracy = torch.from_numpy(np.concatenate(accuracies, dtype=np.float32))
    datasets = np.repeat(config.datasets, n).tolist() if len(parts) > 1 else []
    features = joined_by_name(blocks)
    return ProfileTable(
        name="simulated-" + "+".join(config.datasets),
        knobs=GRIDS[config.grid],
        configurations=_full_grid(GRIDS[config.grid]),
        accuracy=accuracy,
        latency_ms=torch.from_numpy(np.concatenate(times, dtype=np.float32)),
        mask=torch.ones_like(accuracy, dtype=torch.bool),
        sample_ids=tuple(map(str, range(n))) * len(parts),
        datasets=tuple(datasets),
        features=features,
        notes=(
            f"simulated, not measured: calibrated to published numbers, grid {config.grid}, seed "
            f"{config.seed}",
        ),
    )


def blocks_lost(removed: tuple[int, ...]) -> float:
    """Compute the accuracy lost by removing these blocks.

    It is less than the sum over the blocks, and never more than for block 0 alone.
    """
    most = BLOCK_LOSS[0]
    return float(most * (1 - np.prod(1 - BLOCK_LOSS[list(removed)] / most)))


def _full_grid(knobs: tuple[Knob, ...]) -> torch.Tensor:
    """Return all combinations of the knobs' values as value indices, int64 [C, K].

    The last knob runs fastest.
    """
    return torch.cartesian_prod(*(torch.arange(len(knob.values)) for knob in knobs))


def _check(config: SimulatedConfig) -> None:
    names = set(config.datasets)
    if not names or not names <= DATA_SETS.keys() or len(names) < len(config.datasets):
        raise InputError(
            f"profile.datasets={list(config.datasets)}: must be some of {', '.join(DATA_SETS)}, "
            "each once"
        )
    one_of("profile.grid", config.grid, GRIDS)
    one_of("profile.latency", config.latency, ("total", "prefill", "vision_prefill"))
    at_least("profile.samples", config.samples, 1)
    at_least("profile.image_width", config.image_width, 0)
    at_least("profile.language_width", config.language_width, 0)
    share("profile.signal", config.signal)


class _Sizes(NamedTuple):
    """The sizes that times and accuracies depend on, for n samples and C configurations."""

    nominal: Array
    """[C], the mean number of crops."""
    top_k: Array
    """[C], experts per token."""
    blocks: Array
    """[C], active blocks."""
    crops: Array
    """[n, C], the number of crops of a record."""
    vision_tokens: Array
    """[n, C], the vision tokens of a record."""


def _draw(config: SimulatedConfig, dataset: str) -> tuple[Array, Array, dict[str, torch.Tensor]]:
    """Draw accuracies [n, C], latencies [n, C] and features of one data set."""
    published = DATA_SETS[dataset]
    # a stream for each quantity, so that the widths of features change nothing else
    streams = np.random.default_rng([config.seed, zlib.crc32(dataset.encode())]).spawn(6)
    latents, for_prefill, for_steps, for_answers, for_lengths, for_features = streams
    z = latents.standard_normal((config.samples, 7))
    sizes = _sizes(config, z)
    text_effect = TEXT_EFFECT[config.grid]
    vision = _vision(published, text_effect, sizes.nominal) * (sizes.crops + 1)
    vision = vision / (sizes.nominal + 1)
    prefill = _draw_prefill(sizes, z, text_effect, for_prefill)
    decode = _draw_decode(published, sizes, z, for_steps, for_lengths)
    stages = {
        "prefill": prefill,
        "vision_prefill": vision + prefill,
        "total": vision + prefill + decode,
    }
    accuracy = _draw_accuracy(published, sizes, z, for_answers)
    features = _features(config, dataset, z, for_features)
    return accuracy, stages[config.latency], features


def _sizes(config: SimulatedConfig, z: Array) -> _Sizes:
    """Return the knob values of the configurations, and the crops and vision tokens of records."""
    knobs = GRIDS[config.grid]
    first, top_k, blocks = (
        np.array(knob.values)[column]
        for knob, column in zip(knobs, _full_grid(knobs).numpy().T, strict=True)
    )
    # the share of samples that have smaller images, [n, 1]
    size = ndtr(z[:, 1])[:, None]
    if config.grid == "tiers":
        least, most = np.array([TIERS[tier] for tier in first]).T
        nominal = (least + most) / 2
        crops = (least + np.floor(size * (most - least + 1))).clip(least, most)
    else:
        nominal = first.astype(np.float64)
        crops = np.broadcast_to(nominal, (len(z), len(nominal)))
    fewer = 0.05 * ndtr(-z[:, 1])[:, None]
    vision_tokens = np.rint((crops + 1) * 144 * (1 - fewer)).astype(np.int64)
    return _Sizes(nominal, top_k, blocks, crops, vision_tokens)


def _draw_prefill(
    sizes: _Sizes, z: Array, text_effect: float, generator: np.random.Generator
) -> Array:
    """Draw prefill times in ms, [n, C]: they depend on all tokens and have noise and stalls."""
    shape = sizes.crops.shape
    text_tokens = np.rint(REFERENCE_TEXT * np.exp(TEXT_SPREAD * z[:, 2])).clip(4)
    text_factor = (text_tokens.astype(np.int64) / REFERENCE_TEXT)[:, None] ** text_effect
    noise = np.exp(PREFILL_NOISE * generator.standard_normal(shape) - PREFILL_NOISE**2 / 2)
    stalled = generator.random(shape) < STALLS
    noise *= 1 + stalled * generator.exponential(STALL, shape)
    return _prefill(sizes.vision_tokens, sizes.top_k, sizes.blocks) * text_factor * noise


def _draw_decode(
    published: DataSet,
    sizes: _Sizes,
    z: Array,
    for_steps: np.random.Generator,
    for_lengths: np.random.Generator,
) -> Array:
    """Draw decoding times in ms, [n, C]: the steps after the first token."""
    shape = sizes.crops.shape
    noise = STEP_NOISE * for_steps.standard_normal(shape) - STEP_NOISE**2 / 2
    step = _step(sizes.top_k, sizes.blocks) * np.exp(noise)
    # a few records have a length of their own; the others have that of their sample
    new = for_lengths.random(shape) < NEW_LENGTHS
    quantile = np.where(new, for_lengths.random(shape), ndtr(z[:, 3])[:, None])
    _, least, most = published.tokens
    chances = published.ratio ** np.arange(most - least + 1)
    edges = (chances / chances.sum()).cumsum()[:-1]
    tokens = least + np.searchsorted(edges, quantile, side="right")
    return (tokens - 1) * step


def _draw_accuracy(
    published: DataSet, sizes: _Sizes, z: Array, generator: np.random.Generator
) -> Array:
    """Draw accuracies, [n, C]: 0, or the score that annotators agree on for the sample."""
    nominal, top_k, blocks = sizes[:3]
    # each knob is scaled to −1 … 1; how much it matters depends on the sample
    ranges = (
        (np.log1p(nominal), np.log1p(2), np.log1p(12)),
        (np.log(top_k), np.log(4), np.log(32)),
        (blocks, 8, 16),
    )
    scaled = [2 * (value - low) / (high - low) - 1 for value, low, high in ranges]
    matters = SUITS * np.stack(scaled)
    spread = np.sqrt(DIFFICULTY**2 + np.square(matters).sum(0) + ANSWER_NOISE**2)
    # the probability of a right answer is mean accuracy / mean score of a right answer
    probability = _mean_accuracy(published, nominal, top_k, blocks) / (SCORES @ SHARES)
    margin = spread * ndtri(probability)
    suits = np.ascontiguousarray(z[:, 4:])
    margin = margin + DIFFICULTY * z[:, :1] + suits @ matters
    margin = margin + ANSWER_NOISE * generator.standard_normal(sizes.crops.shape)
    return (margin > 0) * generator.choice(SCORES, (len(z), 1), p=SHARES)


def _prefill(vision_tokens: Array, top_k: Array, blocks: Array) -> Array:
    """Compute the prefill time in ms at the reference text length."""
    return (
        PREFILL_MS
        * (vision_tokens / REFERENCE["vision"]) ** EFFECT["vision"]
        * (top_k / REFERENCE["top_k"]) ** EFFECT["top_k"]
        * (blocks / REFERENCE["blocks"]) ** EFFECT["blocks"]
    )


def _step(top_k: Array, blocks: Array) -> Array:
    """Compute the mean ms of a decoding step.

    It is 36 at the smallest values of both knobs, and 48 at the largest.
    """
    return 36 + 9 * (blocks - 8) / 8 + 3 * np.log(top_k / 4) / np.log(8)


def _vision(known: DataSet, text_effect: float, nominal: Array) -> Array:
    """Compute the mean vision time in ms for each number of crops, [C].

    At 2 crops and at those of the best tier, it is what prefill and decoding leave of the published
    total. The other tier takes a published share of the best one's time. Without an image the time
    is 0; in between it is linear.
    """
    # the mean of the factor by which the text length changes prefill
    longer = np.exp((text_effect * TEXT_SPREAD) ** 2 / 2)

    def left(total: float, crops: int, top_k: int, blocks: int) -> float:
        k = np.array(top_k)
        b = np.array(blocks)
        prefill = longer * _prefill(np.array((crops + 1) * 144 * 0.975), k, b)
        return float(total - prefill - (known.tokens[0] - 1) * _step(k, b))

    crops = {"medium": 6, "high": 12}
    best = left(known.best[1], crops[known.best_tier], 8, TOTAL_BLOCKS)
    times = {tier: best * (1 if tier == known.best_tier else known.other_vision) for tier in crops}
    curve = [0.0, left(known.worst[1], 2, 4, 12), times["medium"], times["high"]]
    return np.interp(nominal, [-1, 2, 6, 12], curve)


def _mean_accuracy(known: DataSet, crops: Array, top_k: Array, blocks: Array) -> Array:
    """Compute the mean accuracy of each configuration, [C]."""
    # blocks that cost least are removed first
    cheapest = np.argsort(BLOCK_LOSS, kind="stable")
    by_blocks = np.array(
        [blocks_lost(tuple(cheapest[:removed])) for removed in range(TOTAL_BLOCKS - 7)]
    )
    # experts and crops share what four removed blocks leave of the published range
    left = known.best[0] - known.worst[0] - by_blocks[4]
    by_crops = np.interp(
        np.log1p(crops), np.log1p([2, 6, 12]), [1, known.medium_loss, known.high_loss]
    )
    by_experts = ((8 - top_k).clip(0) / 4) ** 1.7 + 0.1 * np.log2(top_k.clip(8) / 8)
    lost_by_knobs = left * (0.65 * by_crops + 0.35 * by_experts)
    return known.best[0] - by_blocks[TOTAL_BLOCKS - blocks] - lost_by_knobs


def _features(
    config: SimulatedConfig, dataset: str, z: Array, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Draw the feature blocks, float32 [n, width] each.

    Image features depend on difficulty, image size, and how much crops and blocks matter. Language
    features depend on difficulty, both lengths, and how much experts and blocks matter. All data
    sets share the encoder; each adds its own offset.
    """
    noise = generator.standard_normal(z.shape)
    visible = np.sqrt(config.signal) * z + np.sqrt(1 - config.signal) * noise
    # image size and text length are known exactly
    visible[:, 1:3] = z[:, 1:3]
    # the width of a block, and the columns of z that it depends on, see the top of the file
    image = (config.image_width, [0, 1, 4, 6])
    language = (config.language_width, [0, 2, 3, 5, 6])
    blocks = {"image_features": image, "language_features": language}
    features = {}
    for i, (name, (width, latents)) in enumerate(blocks.items()):
        if width:
            encoder = np.random.default_rng([config.seed, i])
            offset = np.random.default_rng([config.seed, i, zlib.crc32(dataset.encode())])
            weights = encoder.standard_normal((len(latents), width), dtype=np.float32)
            block = visible[:, latents].astype(np.float32) @ weights
            block += 0.5 * offset.standard_normal(width, dtype=np.float32)
            block += COLUMN_NOISE * generator.standard_normal(block.shape, dtype=np.float32)
            features[name] = torch.from_numpy(block)
    return features
