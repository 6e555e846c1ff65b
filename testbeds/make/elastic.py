"""Train the elastic model from scratch: `python -m knobwise.testbeds.make.elastic --out FILE`.

Most steps run at the full setting. A model that is trained for every setting alike answers as well
with three blocks as with six, and there is nothing to choose. Most steps also cut windows 4 pixels
apart, and only the last ones 2 pixels and 1 pixel: a window is described by the cells that it
covers, so what is learned from few windows holds for many.

A batch depends on the seed and the number of its step alone, so a training that was stopped ends
where an uninterrupted one does.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.progress import progress
from knobwise.testbeds.elastic.adapter import as_prompt
from knobwise.testbeds.elastic.model import (
    FIRST_POSITION,
    POSITIONS,
    Block,
    ElasticVLM,
    MixtureOfExperts,
    scale_images,
    tile_grid,
    window_starts,
)
from knobwise.testbeds.elastic.scenes import (
    ANSWER_TOKENS,
    BLANK,
    CELL,
    END,
    FILLER,
    MAX_SIDE,
    PROMPT_TOKENS,
    QUESTIONS,
    TOKEN,
    Digits,
    Floats,
    Scene,
    draw_scene,
    load_digits,
)
from knobwise.testbeds.elastic.settings import Configuration, ElasticSize
from knobwise.testbeds.make import to_out

LOOK_UPS = ("digit", "colour", "row", "column", "row_colours", "match")
LEARNING_RATE = 2.5e-3
"""The peak of AdamW's rate, reached after 100 steps; a cosine takes it to 3 %."""
RANDOM_CROPS = 0.5
"""Share of the steps with a random cap on tiles, log-uniform: what few tiles cost is then what they
do not show."""
RANDOM_BLOCKS = 0.06
"""Share of the steps that leave out random middle blocks; half of it in the second half."""
SEED = 0
"""Of the weights and of every batch."""
SAVE_EVERY_S = 30.0
STRIDES = (4, 2, 1)
CALIBRATION_BATCHES = 12


@dataclass
class Recipe:
    """How the model is trained."""

    steps: tuple[int, int, int] = (3200, 500, 350)
    """Steps with windows 4 pixels, 2 pixels and 1 pixel apart; a step is one batch of scenes of one
    size."""
    batch_sizes: tuple[int, int, int] = (48, 48, 24)
    """Scenes per step, likewise."""

    def phase(self, step: int) -> int:
        """Return the index in `STRIDES` that holds at a step."""
        coarse, middle, _ = self.steps
        return (step >= coarse) + (step >= coarse + middle)

    def rate(self, step: int) -> float:
        """Return AdamW's learning rate at a step."""
        cosine = 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / sum(self.steps)))
        return LEARNING_RATE * min(1.0, (step + 1) / 100) * cosine


class Trainee(nn.Module):
    """The elastic model, with the head and the losses that only its training uses.

    The auxiliary losses name the digit that a window shows, and spread tokens over the experts
    (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6).
    """

    def __init__(self, size: ElasticSize) -> None:
        super().__init__()
        self.model = ElasticVLM(size)
        self.digit_head = nn.Linear(size.width, BLANK + 1)
        self.balance: list[Tensor] = []
        """The loss of load balancing of each block, since `loss` began."""
        initialise(self.model)
        for block in self.model.blocks:
            cast(Block, block).experts.register_forward_pre_hook(self._add_balance)

    def _add_balance(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note experts · Σ (mean router share · share of the chosen) of the tokens of a block."""
        experts = cast(MixtureOfExperts, module)
        x, top_k = arguments
        logits = experts.router(x)
        chosen = logits.topk(experts.max_top_k).indices[:, :top_k].flatten()
        counts = chosen.bincount(minlength=logits.shape[1])
        # capped as in `MixtureOfExperts`
        share = logits.tanh().softmax(-1).mean(0)
        self.balance.append(logits.shape[1] * (share * counts / len(chosen)).sum())

    def loss(
        self,
        scenes: list[Scene],
        configuration: Configuration,
        active: tuple[int, ...],
        digit_weight: float,
    ) -> Tensor:
        """Return the loss of a batch of scenes of one size, with these blocks active."""
        self.balance.clear()
        logits, states = self.logits(scenes, configuration, active)
        answers = answer_loss(logits, scenes)
        digits = self._digit_loss(scenes, states, configuration.max_crops)
        return answers + digit_weight * digits + 0.01 * torch.stack(self.balance).sum()

    def logits(
        self, scenes: list[Scene], configuration: Configuration, active: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of each word of the answers, given the right words before it [B, 9,
        words], and the last states of what comes before the answers [B, T, width]."""
        model = self.model
        images = torch.from_numpy(np.concatenate([scene.image for scene in scenes]))
        prompts = torch.cat([as_prompt(scene.question) for scene in scenes])
        answers = torch.stack([answer_tokens(scene) for scene in scenes])  # [B, 9]
        rows, columns = scenes[0].digits.shape
        overview = scale_images(images, tile_grid(rows, columns, 1))
        prefix = model.prefix(images, overview, prompts, configuration.max_crops)
        slots = model.slots.weight[PROMPT_TOKENS : PROMPT_TOKENS + ANSWER_TOKENS - 1]
        spoken = model.words(answers[:, :-1]) + slots
        x = torch.cat((prefix, spoken), 1)
        # what comes before sees all of itself; an answer's word sees that, and the words before it
        length = prefix.shape[1]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask[:length, :length] = True
        for i in active:
            x, _ = model.blocks[i](x, configuration.top_k, mask)
        x = model.norm(x)
        return model.head(x[:, length - 1 :]), x[:, :length]

    def _digit_loss(self, scenes: list[Scene], states: Tensor, max_crops: int) -> Tensor:
        """Return the cross-entropy of the digits in the windows that show exactly one cell; 0 where
        the tiles are scaled down."""
        rows, columns = scenes[0].digits.shape
        grid = tile_grid(rows, columns, max_crops)
        if (grid.height, grid.width) != (rows * CELL, columns * CELL):
            return states.new_zeros(())
        stride = self.model.size.stride
        count = len(window_starts(stride))
        # the windows of the tiles lie between those of the overview and the prompt
        tiles = states[:, 1 + count**2 : -PROMPT_TOKENS]
        tiles = tiles.view(len(states), grid.down, count, grid.across, count, -1)
        aligned = tiles[:, :, :: CELL // stride, :, :: CELL // stride]
        cells = aligned.reshape(len(states), 2 * grid.down, 2 * grid.across, -1)
        logits = self.digit_head(cells[:, :rows, :columns])
        digits = torch.from_numpy(np.stack([scene.digits for scene in scenes]))
        return F.cross_entropy(logits.flatten(0, 2), digits.flatten())

    @torch.no_grad()
    def drop_order(self) -> tuple[int, ...]:
        """Order the middle blocks by greedy removal, the one that is missed least first."""
        rng = np.random.default_rng((SEED, 1_000_003))
        full = self.model.full
        drawn = [
            draw_batch(rng, 32, QUESTIONS, MAX_SIDE, augmented=False)
            for _ in range(CALIBRATION_BATCHES)
        ]
        kept = list(range(full.num_active_blocks))
        order = []
        while len(kept) > 2:
            missed = dict.fromkeys(kept[1:-1], 0.0)
            for block in missed:
                rest = tuple(i for i in kept if i != block)
                for scenes in drawn:
                    missed[block] += answer_loss(self.logits(scenes, full, rest)[0], scenes).item()
            order.append(min(missed, key=missed.__getitem__))
            kept.remove(order[-1])
        return tuple(order)


@torch.no_grad()
def initialise(model: ElasticVLM) -> None:
    """Draw the weights that a training begins with."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    # the n-th word of a list is about its n-th row or column: start from there
    positions = model.words.weight[FIRST_POSITION : FIRST_POSITION + POSITIONS]
    first = PROMPT_TOKENS - 1
    model.slots.weight[first : first + MAX_SIDE] += positions.view(2, MAX_SIDE, -1).sum(0)
    # pixels speak as loudly as positions, and a deep stack starts near the identity
    nn.init.normal_(model.stem.weight, std=0.1)
    for name, weight in model.blocks.named_parameters():
        if name.endswith((".out.weight", "w_out")):
            weight.div_((2 * model.size.blocks) ** 0.5)


def answer_loss(logits: Tensor, scenes: list[Scene]) -> Tensor:
    """Return the mean cross-entropy of the words of the right answers."""
    answers = torch.stack([answer_tokens(scene) for scene in scenes])
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=FILLER)


def answer_tokens(scene: Scene) -> Tensor:
    """Return the tokens of the right answer, closed by `<end>` and filled up: int64 [9]."""
    tokens = torch.full((ANSWER_TOKENS,), FILLER)
    words = scene.answer.split()
    tokens[: len(words) + 1] = torch.tensor([*(TOKEN[word] for word in words), END])
    return tokens


def draw_batch(
    rng: np.random.Generator, count: int, questions: tuple[str, ...], largest: int, augmented: bool
) -> list[Scene]:
    """Draw scenes of one random size, 2 to `largest` cells along each side, from the training
    digits."""
    rows, columns = rng.integers(2, largest + 1, size=2).tolist()
    digits = load_digits(held_out=False)
    if augmented:
        digits = Digits(augment(rng, digits.images), digits.labels)
    names = rng.choice(questions, size=count)
    return [draw_scene(rng, rows, columns, str(name), digits) for name in names]


def augment(rng: np.random.Generator, images: Floats) -> Floats:
    """Shift digits [n, 8, 8] by up to a pixel, and vary their contrast."""
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)])
    shifted = np.lib.stride_tricks.sliding_window_view(padded, (CELL, CELL), axis=(1, 2))
    # most digits stay in the middle, as the held-out ones do
    down = rng.choice(3, size=len(images), p=(0.15, 0.7, 0.15))
    across = rng.choice(3, size=len(images), p=(0.15, 0.7, 0.15))
    contrast = rng.uniform(0.8, 1.1, size=(len(images), 1, 1)).astype(np.float32)
    moved = shifted[np.arange(len(images)), down, across]
    return np.clip(moved * contrast, 0, 1)


def loss_at(trainee: Trainee, recipe: Recipe, step: int) -> Tensor:
    """Return the loss of the batch of a step."""
    rng = np.random.default_rng((SEED, step))
    done = step / sum(recipe.steps)
    phase = recipe.phase(step)
    trainee.model.size = replace(trainee.model.size, stride=STRIDES[phase])
    # look-ups alone first, on small scenes: without them sums and comparisons stay at chance
    questions = LOOK_UPS if done < 0.1 else QUESTIONS
    largest = min(MAX_SIDE, 3 + int(20 * done))
    scenes = draw_batch(rng, recipe.batch_sizes[phase], questions, largest, augmented=True)
    crops, top_k, total = trainee.model.full
    if rng.random() < RANDOM_CROPS:
        crops = int(crops ** rng.random())
    active = tuple(range(total))
    if rng.random() < RANDOM_BLOCKS * (1.0 if done < 0.5 else 0.5):
        left_out = 1 + rng.permutation(total - 2)[: rng.integers(1, total - 1)]
        active = tuple(i for i in active if i not in left_out)
    configuration = Configuration(crops, top_k, total)
    return trainee.loss(scenes, configuration, active, digit_weight=max(0.3, 1 - 1.4 * done))


def train(recipe: Recipe, size: ElasticSize, state: Path) -> Trainee:
    """Train, or resume from the checkpoint at ``state``; return the trainee in evaluation mode,
    with its blocks in order. Raises InputError for a checkpoint of another recipe."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        trainee = Trainee(size)
    optimiser = torch.optim.AdamW(trainee.parameters(), weight_decay=0.01)
    identity = json.dumps({"recipe": asdict(recipe), "size": asdict(size)})
    step = 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        if saved["identity"] != identity:
            raise InputError(f"{state}: of a training with another recipe; remove it")
        trainee.load_state_dict(saved["trainee"])
        optimiser.load_state_dict(saved["optimiser"])
        step = saved["step"]
    total = sum(recipe.steps)
    saved_s = time.monotonic()
    with progress("training", total, step) as tick:
        while step < total:
            optimiser.param_groups[0]["lr"] = recipe.rate(step)
            loss = loss_at(trainee, recipe, step)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trainee.parameters(), 1.0)
            optimiser.step()
            step += 1
            tick(step, f"loss {loss.item():.2f}")
            if step == total or time.monotonic() - saved_s > SAVE_EVERY_S:
                content = {
                    "identity": identity,
                    "step": step,
                    "trainee": trainee.state_dict(),
                    "optimiser": optimiser.state_dict(),
                }
                with written_whole(state) as temporary:
                    torch.save(content, temporary)
                saved_s = time.monotonic()
    trainee.eval()
    trainee.model.size = size
    trainee.model.drop_order = trainee.drop_order()
    return trainee


def save(model: ElasticVLM, path: Path) -> None:
    """Write the weights in half precision, as `read_model` reads them."""
    metadata = {
        "size": json.dumps(asdict(model.size)),
        "drop_order": json.dumps(model.drop_order),
    }
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    with written_whole(path) as temporary:
        save_file(weights, temporary, metadata)


def make(out: Path) -> None:
    """Train the model that comes with knobwise, and write its weights to a file."""
    torch.set_num_threads(1)
    save(train(Recipe(), ElasticSize(), out.with_suffix(".training.pt")).model, out)


def main() -> None:
    """Train as the command line says."""
    to_out("Train the elastic model from scratch.", make)


if __name__ == "__main__":
    main()
