"""Simulated profiles of a vision-language model with three knobs, calibrated to what was published
about one.

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

docs/profiles.md has published and simulated numbers side by side.
"""

from __future__ import annotations

import math
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from knobwise.common.checks import at_least, one_of
from knobwise.common.errors import InputError
from knobwise.envs.simulated.settings import SimulatedConfig
from knobwise.envs.tables.profile_table import Knob, ProfileTable

Floats = NDArray[np.float64]

_NUMBERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PREFILL = SimpleNamespace(**_NUMBERS["prefill"])
ANSWERS = SimpleNamespace(**_NUMBERS["answers"])
TIERS: dict[str, tuple[int, int]] = _NUMBERS["tiers"]
"""Fewest and most crops."""
GRIDS = {
    grid: tuple(Knob(k, tuple(v)) for k, v in values.items())
    for grid, values in _NUMBERS["grids"].items()
}
DATA_SETS = {
    name: SimpleNamespace(**published) for name, published in _NUMBERS["data_sets"].items()
}
BLOCK_LOSS: Floats = np.array(_NUMBERS["block_loss"])
"""Accuracy lost by removing one block."""
TOTAL_BLOCKS = len(BLOCK_LOSS)


class Records(NamedTuple):
    """One data set, drawn: arrays [n, C] unless said otherwise; times in ms."""

    accuracy: Floats
    vision: Floats
    prefill: Floats
    decode: Floats
    features: dict[str, torch.Tensor]
    """Float32 [n, width] each."""

    @property
    def vision_prefill(self) -> Floats:
        return self.vision + self.prefill

    @property
    def total(self) -> Floats:
        return self.vision + self.prefill + self.decode


def simulate(config: SimulatedConfig) -> ProfileTable:
    """Draw the profile. The same config gives the same table; a data set has the same samples
    whatever other data sets are drawn. Raises InputError for an unknown data set, grid or latency,
    no samples, a signal outside [0, 1], or negative numbers."""
    _check(config)
    drawn = {dataset: _draw(config, dataset) for dataset in config.datasets}
    parts = list(drawn.values())
    times = [getattr(part, config.latency) for part in parts]
    n = config.samples
    accuracy = torch.from_numpy(np.concatenate([part.accuracy for part in parts], dtype=np.float32))
    return ProfileTable(
        name="simulated-" + "+".join(drawn),
        knobs=GRIDS[config.grid],
        configurations=torch.from_numpy(_full_grid(GRIDS[config.grid])),
        accuracy=accuracy,
        latency_ms=torch.from_numpy(np.concatenate(times, dtype=np.float32)),
        mask=torch.ones_like(accuracy, dtype=torch.bool),
        sample_ids=tuple(map(str, range(n))) * len(parts),
        datasets=tuple(dataset for dataset in drawn for _ in range(n)) if len(parts) > 1 else (),
        features={
            name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features
        },
        notes=(
            f"simulated, not measured: calibrated to published numbers, grid {config.grid}, seed "
            f"{config.seed}",
        ),
    )


def blocks_lost(removed: tuple[int, ...]) -> float:
    """Accuracy lost by removing these blocks: less than the sum, and never more than for block 0
    alone."""
    most = BLOCK_LOSS[0]
    return float(most * (1 - np.prod(1 - BLOCK_LOSS[list(removed)] / most)))


def _full_grid(knobs: tuple[Knob, ...]) -> NDArray[np.int64]:
    """All combinations of the knobs' values, int64 [C, K]: the index of each value; the last knob
    runs fastest."""
    sizes = [len(knob.values) for knob in knobs]
    return np.indices(sizes).reshape(len(sizes), -1).T.copy()


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
    for name in ("image_width", "language_width"):
        at_least(f"profile.{name}", getattr(config, name), 0)
    if not 0 <= config.signal <= 1:
        raise InputError(f"profile.signal={config.signal}: must be between 0 and 1")


def _draw(config: SimulatedConfig, dataset: str) -> Records:
    published = DATA_SETS[dataset]
    n = config.samples
    # a stream for each quantity, so that the widths of features change nothing else
    streams = np.random.default_rng([config.seed, zlib.crc32(dataset.encode())]).spawn(6)
    latents, for_prefill, for_steps, for_answers, for_lengths, for_features = streams
    z = latents.standard_normal((n, 7))
    _, size, text, length, *suits = z.T

    knobs = GRIDS[config.grid]
    first, top_k, blocks = (
        np.array(k.values)[i] for k, i in zip(knobs, _full_grid(knobs).T, strict=True)
    )
    if config.grid == "tiers":
        least, most = np.array([TIERS[tier] for tier in first]).T
        nominal = (least + most) / 2
        crops = (least + np.floor(ndtr(size)[:, None] * (most - least + 1))).clip(least, most)
    else:
        nominal = first.astype(np.float64)
        crops = np.broadcast_to(nominal, (n, len(nominal)))
    vision_tokens = np.rint((crops + 1) * 144 * (1 - 0.05 * ndtr(-size)[:, None])).astype(np.int64)
    text_tokens = (
        np.rint(PREFILL.reference["text"] * np.exp(PREFILL.text_spread * text))
        .clip(4)
        .astype(np.int64)
    )
    shape = crops.shape

    noise = np.exp(PREFILL.noise * for_prefill.standard_normal(shape) - PREFILL.noise**2 / 2)
    noise *= 1 + (for_prefill.random(shape) < PREFILL.stalls) * for_prefill.exponential(
        PREFILL.stall, shape
    )
    effect = PREFILL.text_effect[config.grid]
    text_factor = (text_tokens / PREFILL.reference["text"])[:, None] ** effect
    prefill = _prefill(vision_tokens, top_k, blocks) * text_factor * noise
    vision = _vision(published, effect)(nominal) * (crops + 1) / (nominal + 1)
    step = _step(top_k, blocks) * np.exp(
        ANSWERS.step_noise * for_steps.standard_normal(shape) - ANSWERS.step_noise**2 / 2
    )
    place = np.where(
        for_lengths.random(shape) < ANSWERS.new_lengths,
        for_lengths.random(shape),
        ndtr(length)[:, None],
    )
    tokens = _lengths(*published.tokens)(place)

    # each knob scaled to −1 … 1; a sample gains or loses by it
    ranges = (
        (np.log1p(nominal), np.log1p(2), np.log1p(12)),
        (np.log(top_k), np.log(4), np.log(32)),
        (blocks, 8, 16),
    )
    places = [2 * (value - low) / (high - low) - 1 for value, low, high in ranges]
    matters = ANSWERS.suits * np.stack(places)
    spread = np.sqrt(ANSWERS.difficulty**2 + np.square(matters).sum(0) + ANSWERS.noise**2)
    agreed = np.array(ANSWERS.scores)
    often = np.array(ANSWERS.shares)
    right = spread * ndtri(_mean_accuracy(published, nominal, top_k, blocks) / (agreed @ often))
    right = right + ANSWERS.difficulty * z[:, :1] + np.stack(suits, 1) @ matters
    right = right + ANSWERS.noise * for_answers.standard_normal(shape) > 0
    accuracy = right * for_answers.choice(agreed, (n, 1), p=often)
    features = _features(config, dataset, z, for_features)
    return Records(accuracy, vision, prefill, (tokens - 1) * step, features)


def _prefill(vision_tokens: NDArray[Any], top_k: NDArray[Any], blocks: NDArray[Any]) -> Floats:
    """Prefill time in ms at the reference text length."""
    inputs = {"vision": vision_tokens, "top_k": top_k, "blocks": blocks}
    factors = [
        (value / PREFILL.reference[name]) ** PREFILL.effect[name] for name, value in inputs.items()
    ]
    return np.asarray(math.prod(factors, start=PREFILL.ms))


def _step(top_k: NDArray[Any], blocks: NDArray[Any]) -> Floats:
    """Mean ms of a decoding step: 36 at the smallest values of both knobs, 48 at the largest."""
    return np.asarray(36 + 9 * (blocks - 8) / 8 + 3 * np.log(top_k / 4) / np.log(8))


def _vision(known: SimpleNamespace, text_effect: float) -> Callable[[Floats], Floats]:
    """Mean vision ms by the number of crops: what prefill and decoding leave of the published
    totals at 2 crops and at the crops of the best tier, linear in between, and 0 without an
    image."""
    longer = np.exp((text_effect * PREFILL.text_spread) ** 2 / 2)

    def left(total: float, crops: int, top_k: int, blocks: int) -> float:
        k = np.array(top_k)
        b = np.array(blocks)
        prefill = longer * _prefill(np.array((crops + 1) * 144 * 0.975), k, b)
        return float(total - prefill - (known.tokens[0] - 1) * _step(k, b))

    crops = {"medium": 6, "high": 12}
    best = left(known.best[1], crops[known.best_tier], 8, TOTAL_BLOCKS)
    times = {tier: best * (1 if tier == known.best_tier else known.other_vision) for tier in crops}
    curve = [0.0, left(known.worst[1], 2, 4, 12), times["medium"], times["high"]]
    return lambda nominal: np.interp(nominal, [-1, 2, 6, 12], curve)


def _mean_accuracy(
    known: SimpleNamespace, crops: Floats, top_k: NDArray[Any], blocks: NDArray[Any]
) -> Floats:
    """Mean accuracy of each configuration, [C]."""
    cheapest = np.argsort(BLOCK_LOSS, kind="stable")
    by_blocks = np.array(
        [blocks_lost(tuple(cheapest[:removed])) for removed in range(TOTAL_BLOCKS - 7)]
    )
    left = known.best[0] - known.worst[0] - by_blocks[4]
    by_crops = np.interp(
        np.log1p(crops), np.log1p([2, 6, 12]), [1, known.medium_loss, known.high_loss]
    )
    by_experts = ((8 - top_k).clip(0) / 4) ** 1.7 + 0.1 * np.log2(top_k.clip(8) / 8)
    return np.asarray(
        known.best[0]
        - by_blocks[TOTAL_BLOCKS - blocks]
        - left * (0.65 * by_crops + 0.35 * by_experts)
    )


def _lengths(mean: float, least: int, most: int) -> Callable[[Floats], NDArray[np.int64]]:
    """Quantile function of a geometric distribution from `least` on, cut at `most`, with this
    mean."""
    counts = np.arange(most - least + 1)
    low = 0.0
    high = 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        chances = ratio**counts / (ratio**counts).sum()
        if chances @ counts < mean - least:
            low, high = (ratio, high)
        else:
            low, high = (low, ratio)
    edges = chances.cumsum()[:-1]
    return lambda place: least + np.searchsorted(edges, place, side="right")


def _features(
    config: SimulatedConfig, dataset: str, z: Floats, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Image features read difficulty, size and the usefulness of crops and blocks; language
    features read difficulty, both lengths and the usefulness of experts and blocks. All data sets
    share the encoder and differ by an offset."""
    visible = np.sqrt(config.signal) * z + np.sqrt(1 - config.signal) * generator.standard_normal(
        z.shape
    )
    visible[:, 1:3] = z[:, 1:3]
    image = (config.image_width, [0, 1, 4, 6])
    language = (config.language_width, [0, 2, 3, 5, 6])
    blocks = {"image_features": image, "language_features": language}
    features = {}
    for number, (name, (width, which)) in enumerate(blocks.items()):
        if width:
            encoder = np.random.default_rng([config.seed, number])
            offset = np.random.default_rng([config.seed, number, zlib.crc32(dataset.encode())])
            weights = encoder.standard_normal((len(which), width), dtype=np.float32)
            block = visible[:, which].astype(np.float32) @ weights
            block += 0.5 * offset.standard_normal(width, dtype=np.float32)
            block += ANSWERS.column_noise * generator.standard_normal(block.shape, dtype=np.float32)
            features[name] = torch.from_numpy(block)
    return features
