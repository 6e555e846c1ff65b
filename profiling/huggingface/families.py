"""The families of Hugging Face VLMs that can take more or fewer crops (or pixels) of an image, and
how to set that.

For every family `max_crops` is a cap: no image gets more, and most get as many as their shape can
use. An overview of the whole image that is encoded in addition to the crops does not count.

A new family is a case in `FAMILIES`. Where its language model has another name for its experts, it
also gets a line in `TOP_K_IN_CONFIGURATION` of `knobs.py`; where its overview is the same at every
setting, one in `SAME_AT_EVERY_SETTING` of `first_stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, isqrt
from typing import Any

from knobwise.profiling.measuring.adaptive_model import KNOBS, KnobSupport

Assignment = tuple[Any, str, Any]
"""An object, the name of an attribute of it, the value to give it."""

TOKENS_PER_CROP = 64
"""Where a family has a resolution instead of crops, the pixels of so many vision tokens count as
one."""

GEMMA_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The only budgets that Gemma 4 takes, vision tokens of an image."""

ARIA_SIDES = (490, 980)
"""The only sides of a crop that Aria takes, pixels."""


ImageKnob = tuple[KnobSupport, Callable[[int], list[Assignment]]]
"""`max_crops` on one model and processor, and what sets a value other than its default."""

_TILES = "image tiles, at most, beside the overview of the whole image"


def image_knob(model: Any, processor: Any) -> ImageKnob:
    """How `max_crops` is set on a model, if it can be."""
    family = model.config.model_type
    if family not in FAMILIES:
        note = (
            f"how the processor of {family!r} makes crops is not known; known are "
            f"{', '.join(FAMILIES)}. Implement "
        )
        note += "knobwise.profiling.measuring.adaptive_model.AdaptiveVLM to set them"
        return KnobSupport(KNOBS[0], default=0, note=note), lambda value: []
    support, assign = FAMILIES[family](model, processor)
    if not support.available:
        support = replace(
            support, sets="", note="the processor of this model has no higher cap than one"
        )
    return support, assign


def _tiles(name: str) -> Callable[[Any, Any], ImageKnob]:
    """A cap that is an attribute of the image processor (Llama4, Molmo2)."""

    def knob(model: Any, processor: Any) -> ImageKnob:
        pixels = processor.image_processor
        most = int(getattr(pixels, name))
        return KnobSupport(KNOBS[0], most, 1, most, _TILES), lambda value: [(pixels, name, value)]

    return knob


def _llava_next(model: Any, processor: Any) -> ImageKnob:
    """Keep, of the grids that an image can be cut into, those with no more tiles. Model and
    processor have a list each."""
    pixels = processor.image_processor
    sides = (
        (pixels.crop_size or {}, "height"),
        (pixels.size, "height"),
        (pixels.size, "shortest_edge"),
    )
    side = next(int(size[name]) for size, name in sides if name in size)
    tiles = {
        tuple(grid): ceil(grid[0] / side) * ceil(grid[1] / side)
        for grid in pixels.image_grid_pinpoints
    }
    owners = [pixels, *_configurations(model, "image_grid_pinpoints")]

    def assign(value: int) -> list[Assignment]:
        grids = [list(grid) for grid, count in tiles.items() if count <= value] or [[side, side]]
        return [(owner, "image_grid_pinpoints", grids) for owner in owners]

    most = max(tiles.values())
    return KnobSupport(KNOBS[0], most, 1, most, _TILES), assign


def _idefics3(model: Any, processor: Any) -> ImageKnob:
    """Images are scaled to k tiles along their longer side, whatever their size; so the cap works
    in squares."""
    pixels = processor.image_processor
    side = int(pixels.max_image_size["longest_edge"])
    along = max(1, ceil(int(pixels.size.get("longest_edge", side)) / side))

    def assign(value: int) -> list[Assignment]:
        # an odd edge could be rounded up by a pixel, and begin another row of tiles
        edge = isqrt(value) * side // 2 * 2
        return [
            (pixels, "size", _resized(pixels.size, longest_edge=edge)),
            (pixels, "do_image_splitting", value > 1),
        ]

    squares = [k * k for k in range(1, along + 1)]
    note = (
        f"takes effect in squares, {', '.join(map(str, squares))}: a value "
        "between two counts as the lower"
    )
    if pixels.do_image_splitting:
        default = squares[-1]
    else:
        default = 1
    return KnobSupport(KNOBS[0], default, 1, squares[-1], _TILES, note), assign


def _aria(model: Any, processor: Any) -> ImageKnob:
    """Crops of 490 or 980 pixels, counted by area: one of 980 is four of 490. Without an
    overview."""
    pixels = processor.image_processor
    # settings that the processor passes on override those of its image processor
    current = {
        "max_image_size": pixels.max_image_size,
        "split_image": pixels.split_image,
        **processor.images_kwargs,
    }
    side = int(current["max_image_size"])
    area = (side // ARIA_SIDES[0]) ** 2
    crops = {
        tuple(size): ceil(size[0] / side) * ceil(size[1] / side)
        for size in pixels.split_resolutions
    }
    most = max(crops.values())

    def assign(value: int) -> list[Assignment]:
        changed: dict[str, Any] = {"max_image_size": side, "split_image": value // area > 1}
        if value < area:
            changed["max_image_size"] = ARIA_SIDES[0]
        elif value // area > 1:
            changed["split_resolutions"] = [
                list(size) for size, count in crops.items() if count <= value // area
            ]
        assignments = [(pixels, name, setting) for name, setting in changed.items()]
        return [*assignments, (processor, "images_kwargs", {**processor.images_kwargs, **changed})]

    counts = sorted({1, *(area * count for count in {1, *crops.values()})})
    if current["split_image"]:
        default = area * most
    else:
        default = area
    sets = f"image area that is encoded, at most, in squares of {ARIA_SIDES[0]} pixels"
    note = (
        f"takes effect at {', '.join(map(str, counts))}; images of one call "
        "must be cut into equally many crops, "
    )
    note += "which is a limit of the family's processor"
    return KnobSupport(KNOBS[0], default, 1, area * most, sets, note), assign


def _pixels(frames: bool = False) -> Callable[[Any, Any], ImageKnob]:
    """The most pixels of an image (Qwen-VL, GLM-V); `frames`: an image counts as the frames of one
    step in time."""

    def knob(model: Any, processor: Any) -> ImageKnob:
        pixels = processor.image_processor
        if frames:
            copies = int(pixels.temporal_patch_size)
        else:
            copies = 1
        token = (int(pixels.patch_size) * int(pixels.merge_size)) ** 2
        unit = TOKENS_PER_CROP * token * copies
        least = int(pixels.size["shortest_edge"])
        most = int(pixels.size["longest_edge"])

        def assign(value: int) -> list[Assignment]:
            cap = value * unit
            # images below the least are scaled up and rounded up: half the cap leaves room for that
            size = _resized(pixels.size, shortest_edge=min(least, cap // 2), longest_edge=cap)
            return [(pixels, "size", size)]

        count = max(1, ceil(most / unit))
        sets = (
            f"pixels of the image, at most, in units of {unit // copies} pixels "
            f"({TOKENS_PER_CROP} vision tokens)"
        )
        return KnobSupport(KNOBS[0], count, 1, count, sets), assign

    return knob


def _gemma4(model: Any, processor: Any) -> ImageKnob:
    """Every image is scaled to as many vision tokens as its shape makes of the budget."""
    pixels = processor.image_processor
    unit = GEMMA_SOFT_TOKENS[0]
    counts = [tokens // unit for tokens in GEMMA_SOFT_TOKENS]

    def assign(value: int) -> list[Assignment]:
        return [
            (pixels, "max_soft_tokens", max(count for count in counts if count <= value) * unit)
        ]

    default = int(pixels.max_soft_tokens) // unit
    sets = f"vision tokens of the image, at most, in units of {unit}"
    note = f"takes effect at {', '.join(map(str, counts))}: a value between two counts as the lower"
    return KnobSupport(KNOBS[0], default, 1, counts[-1], sets, note), assign


FAMILIES: dict[str, Callable[[Any, Any], ImageKnob]] = {
    "llama4": _tiles("max_patches"),
    "aria": _aria,
    "llava_next": _llava_next,
    "gemma4": _gemma4,
    "molmo2": _tiles("max_crops"),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics3),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _pixels()
    ),
    **dict.fromkeys(("glm4v", "glm4v_moe"), _pixels(frames=True)),
}
"""By the model type of the configuration."""


def _resized(size: Any, **changed: int) -> Any:
    """Return a copy of a processor's size, which is a dictionary or transformers' own kind of
    one."""
    if isinstance(size, dict):
        return {**size, **changed}
    return replace(size, **changed)


def _configurations(model: Any, name: str) -> list[Any]:
    """Return the configurations of a model and its parts that have a setting of this name, each
    once."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    return [config for config in configs.values() if name in vars(config)]
