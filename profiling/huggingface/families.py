"""The families of Hugging Face VLMs that can take more or fewer crops (or pixels) of an image, and
how to set the number.

For every family `max_crops` is a cap: no image gets more, and most get as many as their shape can
use. An overview of the whole image that is encoded in addition to the crops does not count.

A new family is a case in `FAMILIES`. Where its language model has another name for its experts, it
also gets a line in `TOP_K_IN_CONFIGURATION` of `knobs.py`; where its overview is the same at every
setting, one in `SAME_AT_EVERY_SETTING` of `first_stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, isqrt
from typing import TYPE_CHECKING, NamedTuple

from knobwise.profiling.measuring.adaptive_model import KnobSupport

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

Assignment = tuple[object, str, object]
"""An object, the name of an attribute of it, the value to give it."""

TOKENS_PER_CROP = 64
"""Where a family has a resolution instead of crops, the pixels of this many vision tokens count as
one crop."""

GEMMA_SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""The only caps that Gemma 4 takes, in vision tokens of an image."""

ARIA_SIDES = (490, 980)
"""The only sides of a crop that Aria takes, in pixels."""


class ModelKnob(NamedTuple):
    """A knob of one model and processor."""

    support: KnobSupport
    assignments: Callable[[int], list[Assignment]]
    """Returns what must be assigned, for a while, to set a value."""


Family = Callable[["PreTrainedModel", "BaseImageProcessor", "ProcessorMixin"], ModelKnob]
"""A function of a model, its image processor and its processor, which returns their knob."""

_TILES = "image tiles, at most, beside the overview of the whole image"


def crops_knob(
    model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase
) -> ModelKnob:
    """Return `max_crops` of a model, and what sets it. The knob has one value if it cannot be
    set."""
    family = model.config.model_type
    if processor is not None and not hasattr(processor, "image_processor"):
        note = "a language model takes no images"
    elif family in FAMILIES:
        return FAMILIES[family](model, processor.image_processor, processor)
    else:
        note = (
            f"how the processor of {family!r} makes crops is not known; known are "
            f"{', '.join(FAMILIES)}. Implement "
            "knobwise.profiling.measuring.adaptive_model.AdaptiveVLM to set them"
        )
    return ModelKnob(KnobSupport("max_crops", 0, note=note), lambda value: [])


def _cap(default: int, most: int, sets: str = _TILES) -> KnobSupport:
    return KnobSupport("max_crops", default, 1, most, sets)


def _count_tiles(sizes: Iterable[Sequence[int]], side: int) -> dict[tuple[int, ...], int]:
    """Count the tiles of each size of an image, in pixels."""
    return {tuple(size): ceil(size[0] / side) * ceil(size[1] / side) for size in sizes}


def _tiles(
    model: PreTrainedModel,
    image_processor: BaseImageProcessor,
    processor: ProcessorMixin,
    name: str,
) -> ModelKnob:
    """Set the cap where the image processor holds it in an attribute (Llama4, Molmo2).

    `name` is that of the attribute."""
    most = int(getattr(image_processor, name))
    return ModelKnob(_cap(most, most), lambda value: [(image_processor, name, value)])


def _llava_next(
    model: PreTrainedModel, image_processor: BaseImageProcessor, processor: ProcessorMixin
) -> ModelKnob:
    """Keep only the grids with no more tiles than the cap. The model and its image processor hold
    a list of grids each."""
    size = image_processor.crop_size or image_processor.size
    side = int(size["height"] if "height" in size else size["shortest_edge"])
    tiles = _count_tiles(image_processor.image_grid_pinpoints, side)
    # the model finds its features by the same list; its parts may share a configuration
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    readers = [config for config in configs.values() if "image_grid_pinpoints" in vars(config)]
    owners = [image_processor, *readers]

    def assign(value: int) -> list[Assignment]:
        grids = [list(grid) for grid, count in tiles.items() if count <= value] or [[side, side]]
        return [(owner, "image_grid_pinpoints", grids) for owner in owners]

    most = max(tiles.values())
    return ModelKnob(_cap(most, most), assign)


def _idefics3(
    model: PreTrainedModel, image_processor: BaseImageProcessor, processor: ProcessorMixin
) -> ModelKnob:
    """Scale every image to k tiles along its longer side. It then has up to k² tiles, so the cap
    takes effect at squares: between two it counts as the lower."""
    side = int(image_processor.max_image_size["longest_edge"])
    along = max(1, ceil(int(image_processor.size.get("longest_edge", side)) / side))

    def assign(value: int) -> list[Assignment]:
        # an odd edge may be rounded up by a pixel, which would begin another row of tiles
        edge = isqrt(value) * side // 2 * 2
        return [
            (image_processor, "size", replace(image_processor.size, longest_edge=edge)),
            (image_processor, "do_image_splitting", value > 1),
        ]

    most = along**2
    default = most if image_processor.do_image_splitting else 1
    return ModelKnob(_cap(default, most), assign)


def _aria(
    model: PreTrainedModel, image_processor: BaseImageProcessor, processor: ProcessorMixin
) -> ModelKnob:
    """Cut crops of 490 or 980 pixels, counted by area: one of 980 is four of 490. There is no
    overview. The family's processor takes images of one call only if it cuts them into equally many
    crops."""
    # settings that the processor passes on override those of its image processor
    passed = processor.images_kwargs
    side = int(passed.get("max_image_size", image_processor.max_image_size))
    area = (side // ARIA_SIDES[0]) ** 2
    crops = _count_tiles(image_processor.split_resolutions, side)

    def assign(value: int) -> list[Assignment]:
        # whole crops of the usual side that fit under the cap
        count = value // area
        changed: dict[str, object] = {"max_image_size": side, "split_image": count > 1}
        if count < 1:
            changed["max_image_size"] = ARIA_SIDES[0]
        elif count > 1:
            sizes = [list(size) for size, needed in crops.items() if needed <= count]
            changed["split_resolutions"] = sizes
        assignments = [(image_processor, name, setting) for name, setting in changed.items()]
        return [*assignments, (processor, "images_kwargs", {**passed, **changed})]

    most = area * max(crops.values())
    default = area
    if passed.get("split_image", image_processor.split_image):
        default = most
    sets = f"image area that is encoded, at most, in squares of {ARIA_SIDES[0]} pixels"
    return ModelKnob(_cap(default, most, sets), assign)


def _pixels(
    model: PreTrainedModel,
    image_processor: BaseImageProcessor,
    processor: ProcessorMixin,
    frames: bool = False,
) -> ModelKnob:
    """Cap the pixels of an image (Qwen-VL, GLM-V).

    With `frames` an image counts as all frames of one step in time."""
    # a vision token is a square of merged patches
    side = int(image_processor.patch_size) * int(image_processor.merge_size)
    unit = TOKENS_PER_CROP * side**2
    sets = (
        f"pixels of the image, at most, in units of {unit} pixels ({TOKENS_PER_CROP} vision tokens)"
    )
    if frames:
        unit *= int(image_processor.temporal_patch_size)
    least = int(image_processor.size["shortest_edge"])

    def assign(value: int) -> list[Assignment]:
        cap = value * unit
        # images below the least are scaled up and rounded up: half the cap leaves room for that
        size = replace(image_processor.size, shortest_edge=min(least, cap // 2), longest_edge=cap)
        return [(image_processor, "size", size)]

    most = max(1, ceil(int(image_processor.size["longest_edge"]) / unit))
    return ModelKnob(_cap(most, most, sets), assign)


def _gemma4(
    model: PreTrainedModel, image_processor: BaseImageProcessor, processor: ProcessorMixin
) -> ModelKnob:
    """Scale every image to as many vision tokens as its shape can use of the cap, which counts as
    the highest of `GEMMA_SOFT_TOKENS` below it."""
    unit = GEMMA_SOFT_TOKENS[0]
    counts = [tokens // unit for tokens in GEMMA_SOFT_TOKENS]

    def assign(value: int) -> list[Assignment]:
        tokens = max(count for count in counts if count <= value) * unit
        return [(image_processor, "max_soft_tokens", tokens)]

    default = int(image_processor.max_soft_tokens) // unit
    sets = f"vision tokens of the image, at most, in units of {unit}"
    return ModelKnob(_cap(default, counts[-1], sets), assign)


FAMILIES: dict[str, Family] = {
    "llama4": partial(_tiles, name="max_patches"),
    "aria": _aria,
    "llava_next": _llava_next,
    "gemma4": _gemma4,
    "molmo2": partial(_tiles, name="max_crops"),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics3),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _pixels
    ),
    **dict.fromkeys(("glm4v", "glm4v_moe"), partial(_pixels, frames=True)),
}
"""By the model type of the configuration."""
