"""Train the elastic model from scratch, mostly at its full setting: one trained for every setting alike would answer as
well with three blocks as with six, and there would be nothing to choose."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from knobwise.common.progress import progress
from knobwise.profiling.elastic.model import ElasticVLM, TileGrid, tile_grid
from knobwise.profiling.elastic.resumable_training import train_resumably
from knobwise.profiling.elastic.scenes import FILLER, MAX_SIDE, QUESTIONS, Scenes, draw_scenes, load_digits
from knobwise.profiling.elastic.settings import Configuration, ElasticSize, TrainingConfig

_LOOK_UPS = ("digit", "colour", "row", "column", "row_colours", "match")


def train(settings: TrainingConfig, size: ElasticSize, state: Path, save_every_s: float = 15.0) -> ElasticVLM:
    """Train, or resume from the checkpoint at ``state``, and return the model with its drop order calibrated; batches
    depend on (seed, step) alone, and errors are as for `train_resumably`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = ElasticVLM(size)
    trained_s = train_resumably(
        model,
        lambda step: _loss(model, settings, step),
        state,
        {"settings": asdict(settings), "size": asdict(size)},
        what="training",
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        rise=100,
        save_every_s=save_every_s,
    )
    start = process_time()
    model.drop_order = calibrate(model, settings.seed)
    model.training_s = trained_s + process_time() - start
    return model


@torch.inference_mode()
def calibrate(model: ElasticVLM, seed: int = 0, batches: int = 12) -> tuple[int, ...]:
    """Order the middle blocks by greedy removal, the one whose loss is missed least first (on training digits)."""
    rng = np.random.default_rng((seed, 1_000_003))
    sets = [_draw(rng, 32, QUESTIONS, augment=False) for _ in range(batches)]
    kept, order = list(range(model.size.blocks)), []
    with progress("ordering blocks", len(kept) - 2, quiet_s=2) as tick:
        while len(kept) > 2:
            options = {}
            for block in kept[1:-1]:
                rest = tuple(i for i in kept if i != block)
                options[block] = sum(float(_answer_loss(model, scenes, model.full, rest)[0]) for scenes in sets)
            order.append(min(options, key=options.__getitem__))
            kept.remove(order[-1])
            tick(len(order), "")
    return tuple(order)


def _draw(
    rng: np.random.Generator, count: int, questions: tuple[str, ...], augment: bool, largest: int = MAX_SIDE
) -> Scenes:
    rows, columns = (int(n) for n in rng.integers(2, largest + 1, size=2))
    drawn = tuple(str(q) for q in rng.choice(questions, size=count))
    return draw_scenes(rng, load_digits(held_out=False), rows, columns, drawn, augment)


def _loss(model: ElasticVLM, settings: TrainingConfig, step: int) -> Tensor:
    rng, done = np.random.default_rng((settings.seed, step)), step / settings.steps
    # look-ups alone first: without them sums and comparisons stay at chance
    largest = min(MAX_SIDE, 3 + int(20 * done))
    scenes = _draw(rng, settings.batch_size, _LOOK_UPS if done < 0.1 else QUESTIONS, True, largest)
    crops, top_k, total = model.full
    keep = 1.0 if done < 0.5 else 0.5
    blocks = tuple(range(total))
    if rng.random() < settings.random_crops:
        crops = int(crops ** rng.random())
    if rng.random() < keep * settings.random_top_k:
        top_k = int(rng.integers(1, top_k + 1))
    if rng.random() < keep * settings.random_blocks:
        middle = rng.permutation(total - 2)[: rng.integers(1, total - 1)] + 1
        blocks = tuple(i for i in blocks if i not in middle)
    configuration = Configuration(crops, top_k, total)
    loss, prefix = _answer_loss(model, scenes, configuration, blocks)
    balance = torch.stack([cast(Tensor, model.block(i).experts.balance) for i in blocks]).sum()
    digit_weight = max(0.3, 1 - 1.4 * done)
    return loss + digit_weight * _digit_loss(model, scenes, prefix, crops) + 0.01 * balance


def _answer_loss(
    model: ElasticVLM, scenes: Scenes, configuration: Configuration, blocks: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    images, prompts, answers = (torch.from_numpy(x) for x in (scenes.images, scenes.prompts, scenes.answers))
    logits, prefix = model(images, prompts, answers, configuration, blocks)
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=FILLER), prefix


def _digit_loss(model: ElasticVLM, scenes: Scenes, prefix: Tensor, max_crops: int) -> Tensor:
    """Which digit a window shows, for the windows that show one cell exactly; 0 where the tiles are scaled down."""
    _, rows, columns = scenes.digits.shape
    grid: TileGrid = tile_grid(rows, columns, max_crops)
    if not grid.is_full(rows, columns):
        return prefix.new_zeros(())
    windows = model.tile_states(prefix, grid)[:, :, ::2, :, ::2]  # drop those that straddle two cells
    states = windows.reshape(len(prefix), 2 * grid.down, 2 * grid.across, -1)[:, :rows, :columns]
    return F.cross_entropy(model.digit_head(states).flatten(0, 2), torch.from_numpy(scenes.digits).flatten())
