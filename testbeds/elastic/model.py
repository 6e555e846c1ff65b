"""An elastic vision-language model with three knobs that really change what is computed."""

from __future__ import annotations

import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knobwise.envs.tables.tensor_file import tensors_and_metadata
from knobwise.profiling.measuring.adaptive_model import Answer, clock_ms
from knobwise.testbeds import DATA
from knobwise.testbeds.elastic.scenes import (
    ANSWER_TOKENS,
    CELL,
    END,
    MAX_SIDE,
    PROMPT_TOKENS,
    TOKEN,
    WORDS,
)
from knobwise.testbeds.elastic.settings import Configuration, ElasticSize

TILE = 16  # pixels
_FLAGS = 3  # vertical scale, horizontal scale, overview or not
FIRST_POSITION = TOKEN["r0"]
POSITIONS = 2 * MAX_SIDE  # the words r0 … r7 c0 … c7


class TileGrid(NamedTuple):
    """How an image is cut: the number of tiles down and across, and the height and width in pixels
    that the image is scaled to. Padding fills the rest of the tiles."""

    down: int
    across: int
    height: int
    width: int


@cache
def tile_grid(rows: int, columns: int, max_crops: int) -> TileGrid:
    """Choose the tiles for an image of ``rows × columns`` cells.

    The choice has the highest resolution without upscaling; among equals, the fewest tiles.
    """
    per_tile = TILE // CELL
    options = []
    # along each side, at most as many tiles as the cells fill
    counts = [range(1, math.ceil(side / per_tile) + 1) for side in (rows, columns)]
    for down, across in itertools.product(*counts):
        if down * across <= max_crops:
            scale = min(1.0, per_tile * down / rows) * min(1.0, per_tile * across / columns)
            options.append((scale, -down * across, down, across))
    *_, down, across = max(options)
    return TileGrid(down, across, min(down * TILE, rows * CELL), min(across * TILE, columns * CELL))


def window_starts(stride: int) -> range:
    """Return the pixels of a tile at which its windows begin, along either axis."""
    return range(0, TILE - CELL + 1, stride)


@cache
@torch.inference_mode(False)  # what is kept must do for training too
def window_coordinates(rows: int, columns: int, grids: tuple[TileGrid, ...], stride: int) -> Tensor:
    """Describe each window of the overview, and of the tiles if there are any: [windows, 19].

    A row of the result holds how much of each of the 8 rows and 8 columns of cells the window
    covers, the vertical and the horizontal scale, and 1 for a window of the overview.
    """
    parts: list[Tensor] = []
    for grid in grids:
        scale_y = grid.height / (rows * CELL)
        scale_x = grid.width / (columns * CELL)
        vertical = _covered_cells(grid.down, scale_y, stride)[:, None]
        horizontal = _covered_cells(grid.across, scale_x, stride)[None]
        # the first grid is the overview
        flags = torch.tensor([[[scale_y, scale_x, float(not parts)]]])
        # each becomes [rows of windows, columns of windows, …]
        shape = (len(vertical), horizontal.shape[1], -1)
        described = [part.expand(shape) for part in (vertical, horizontal, flags)]
        parts.append(torch.cat(described, -1).flatten(0, 1))
    return torch.cat(parts)


def _covered_cells(tiles: int, scale: float, stride: int) -> Tensor:
    """Return which share of each cell along an axis each window covers: [windows, 8]."""
    starts = torch.tensor(window_starts(stride))
    pixel = (torch.arange(tiles)[:, None] * TILE + starts).flatten()
    start = pixel[:, None] / CELL / scale
    cell = torch.arange(MAX_SIDE)
    end = torch.minimum(start + 1 / scale, cell + 1.0)
    return (end - torch.maximum(start, cell)).clamp(min=0)


def _cells(images: Tensor) -> tuple[int, int]:
    """Return the rows and columns of cells that images [B, 3, h, w] show."""
    return images.shape[-2] // CELL, images.shape[-1] // CELL


def scale_images(images: Tensor, grid: TileGrid) -> Tensor:
    """Scale images [B, 3, h, w] to the size that they have in a grid."""
    if images.shape[-2:] == (grid.height, grid.width):
        return images
    return F.interpolate(images, (grid.height, grid.width), mode="bilinear", antialias=True)


def cut_windows(images: Tensor, grid: TileGrid, stride: int) -> Tensor:
    """Scale and pad images [B, 3, h, w], and cut them into windows [B, windows, 192], row by
    row."""
    images = scale_images(images, grid)
    pad = (0, grid.across * TILE - grid.width, 0, grid.down * TILE - grid.height)
    if any(pad):
        images = F.pad(images, pad)
    # [B, 3, down, across, 16, 16], then windows inside each tile
    cut = images.unfold(2, TILE, TILE).unfold(3, TILE, TILE)
    cut = cut.unfold(4, CELL, stride).unfold(5, CELL, stride)
    return cut.permute(0, 2, 4, 3, 5, 1, 6, 7).reshape(len(images), -1, 3 * CELL * CELL)


class MixtureOfExperts(nn.Module):
    """Sparse mixture of experts.

    It is trained with the ``max_top_k`` best experts of a token, whose weights sum to one. A
    smaller ``top_k`` leaves out the last terms of the sum: this saves time, and costs accuracy.
    """

    def __init__(self, size: ElasticSize) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        width = size.width
        hidden = size.expert_width
        self.w_in = nn.Parameter(torch.randn(size.experts, width, hidden) / width**0.5)
        self.w_out = nn.Parameter(torch.randn(size.experts, hidden, width) / hidden**0.5)
        self.max_top_k = size.max_top_k

    def forward(self, x: Tensor, top_k: int) -> Tensor:
        """Run each token [tokens, width] through the experts that it chose."""
        logits = torch.mm(x, self.router.weight.t())
        best, chosen = logits.topk(self.max_top_k)
        # tanh caps the logits: no expert outweighs another by more than e², so each matters
        weight = best.tanh().softmax(-1)[:, :top_k]
        chosen = chosen[:, :top_k]
        if len(x) == 1:  # a decoding step has nothing to sort
            parts = [_expert(x, self.w_in[i], self.w_out[i]) for i in chosen[0].tolist()]
            return torch.mm(weight, torch.cat(parts))
        # choices are sorted by expert, so that each expert runs once on all of its tokens
        flat = chosen.flatten()
        order = flat.argsort()
        counts = flat.bincount(minlength=len(self.w_in))
        # every token has `top_k` choices
        token = order // top_k
        inputs = torch.split(x.index_select(0, token), counts.tolist())
        runs = zip(inputs, self.w_in, self.w_out, strict=True)
        outputs = [_expert(tokens, w_in, w_out) for tokens, w_in, w_out in runs if len(tokens)]
        scaled = torch.cat(outputs) * weight.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(x).index_add_(0, token, scaled)


def _expert(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return torch.mm(F.silu(torch.mm(x, w_in)), w_out)


class Block(nn.Module):
    """Pre-norm attention and experts."""

    def __init__(self, size: ElasticSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.norm_experts = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.experts = MixtureOfExperts(size)

    def forward(
        self, x: Tensor, top_k: int, mask: Tensor | None = None, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Transform tokens [B, T, width].

        Returns:
            the tokens, and all keys and values [2, B, heads, past + T, width / heads].
        """
        batch, length, width = x.shape
        # `mm` instead of linear layers, whose overhead at batch size 1 is as large as their work
        qkv = torch.mm(self.norm_attention(x).view(-1, width), self.qkv.weight.t())
        q, cache = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).split((1, 2))
        if past is not None:
            cache = torch.cat((past, cache), 3)
        # q keeps its axis, [1, B, heads, T, width / heads]
        attended = F.scaled_dot_product_attention(q[0], cache[0], cache[1], attn_mask=mask)
        joined = attended.transpose(1, 2).reshape(-1, width)
        x = x + torch.mm(joined, self.out.weight.t()).view(x.shape)
        x = x + self.experts(self.norm_experts(x).view(-1, width), top_k).view(x.shape)
        return x, cache


class ElasticVLM(nn.Module):
    """The elastic model.

    An image becomes an overview and up to ``max_crops`` tiles, cut into overlapping windows of 8
    pixels, ``stride`` pixels apart, that one linear map turns into tokens (a deliberately weak
    stem: recognition is left to the blocks). Blocks are attention plus a sparse mixture of experts
    (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538): each token runs through its ``top_k``
    experts only. ``num_active_blocks`` leaves out middle blocks, the least important first.

    ``drop_order`` lists the middle blocks, the first to be left out first.
    """

    def __init__(self, size: ElasticSize) -> None:
        super().__init__()
        self.size = size
        width = size.width
        self.stem = nn.Linear(3 * CELL * CELL, width)
        self.scale = nn.Linear(_FLAGS, width)
        self.grid_rows = nn.Embedding(MAX_SIDE + 1, width)
        self.grid_columns = nn.Embedding(MAX_SIDE + 1, width)
        self.words = nn.Embedding(len(WORDS), width)
        self.slots = nn.Embedding(PROMPT_TOKENS + ANSWER_TOKENS, width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(WORDS))
        self.drop_order = tuple(range(size.blocks - 2, 0, -1))

    @property
    def full(self) -> Configuration:
        """The configuration that the model is trained with."""
        return Configuration(self.size.max_crops, self.size.max_top_k, self.size.blocks)

    def active_blocks(self, num_active_blocks: int) -> tuple[int, ...]:
        """Return the indices of the blocks that run, always with the first and the last."""
        total = self.size.blocks
        dropped = self.drop_order[: total - num_active_blocks]
        return tuple(i for i in range(total) if i not in dropped)

    @torch.inference_mode()
    def overview(self, images: Tensor) -> Tensor:
        """Scale images to one tile, [B, 3, 16, 16]. No knob changes it, and every configuration
        begins with it."""
        rows, columns = _cells(images)
        return scale_images(images, tile_grid(rows, columns, 1))

    def first_stage(self, images: Tensor, overview: Tensor, max_crops: int = 0) -> Tensor:
        """Embed grid size, overview and tiles: [B, 1 + windows, width]; no tiles at 0 crops."""
        rows, columns = _cells(images)
        stride = self.size.stride
        grids = tuple(tile_grid(rows, columns, cap) for cap in (1, max_crops) if cap)
        coordinates = window_coordinates(rows, columns, grids, stride)
        # a place in the image and the word for it share one embedding, so a question finds its
        # cells early in training
        position = (
            coordinates[:, :POSITIONS]
            @ self.words.weight[FIRST_POSITION : FIRST_POSITION + POSITIONS]
        )
        # without tiles there is one grid, that of the overview
        parts = zip((overview, images), grids, strict=False)
        windows = self.stem(torch.cat([cut_windows(part, grid, stride) for part, grid in parts], 1))
        size = self.grid_rows.weight[rows] + self.grid_columns.weight[columns]
        windows = windows + (position + self.scale(coordinates[:, POSITIONS:]))
        return torch.cat((size.expand(len(images), 1, -1), windows), 1)

    def prefix(self, images: Tensor, overview: Tensor, prompts: Tensor, max_crops: int) -> Tensor:
        """Embed grid size, overview, tiles and prompt: [B, 1 + windows + 6, width]."""
        question = self.words(prompts) + self.slots.weight[:PROMPT_TOKENS]
        return torch.cat((self.first_stage(images, overview, max_crops), question), 1)

    @torch.inference_mode()
    def generate(
        self, image: Tensor, overview: Tensor, prompt: Tensor, configuration: Configuration
    ) -> Answer:
        """Decode one answer greedily with a KV cache, and time it by `clock_ms`.

        ``image`` is [1, 3, h, w], ``overview`` its `overview`, ``prompt`` [1, 6]. ``vision_ms`` is
        the time until everything is embedded.
        """
        active = [self.blocks[i] for i in self.active_blocks(configuration.num_active_blocks)]
        top_k = configuration.top_k
        tokens = []
        start = clock_ms()
        x = self.prefix(image, overview, prompt, configuration.max_crops)
        embedded = clock_ms()
        length = x.shape[1]
        # prefill
        past = []
        for block in active:
            x, cache = block(x, top_k)
            past.append(cache)
        tokens.append(int(self.head(self.norm(x[:, -1])).argmax()))
        prefill = clock_ms()
        # decoding, one token at a time
        while tokens[-1] != END and len(tokens) < ANSWER_TOKENS:
            slot = self.slots.weight[PROMPT_TOKENS + len(tokens) - 1]
            x = (self.words.weight[tokens[-1]] + slot)[None, None]
            for i, block in enumerate(active):
                x, past[i] = block(x, top_k, past=past[i])
            tokens.append(int(self.head(self.norm(x[:, -1])).argmax()))
        return Answer(
            " ".join(WORDS[token] for token in tokens if token != END),
            total_ms=clock_ms() - start,
            prefill_ms=prefill - start,
            vision_ms=embedded - start,
            vision_tokens=length - PROMPT_TOKENS,
            language_tokens=PROMPT_TOKENS,
            output_tokens=len(tokens),
        )


def shipped_model() -> ElasticVLM:
    """Load the trained model that comes with knobwise, which the built-in profile was measured
    on."""
    return read_model(DATA / "elastic.safetensors")


def read_model(path: str | Path) -> ElasticVLM:
    """Load a trained model from a file that `knobwise.testbeds.make.elastic` wrote.

    The file holds weights in half precision. The model has single precision and is in evaluation
    mode.
    """
    weights, metadata = tensors_and_metadata(path)
    model = ElasticVLM(ElasticSize(**json.loads(metadata["size"])))
    model.drop_order = tuple(json.loads(metadata["drop_order"]))
    model.load_state_dict(weights)
    return model.eval()
