"""The overview of an image through a Hugging Face model's own vision tower, kept so that an answer
continues from it.

Where the overview has the same pixels whatever the number of crops (Llama4 from two crops on,
LLaVA-NeXT, Molmo2), the decision and the answer need the same output of the tower. Elsewhere the
pixels depend on the knob (Qwen-VL, GLM4V and Gemma4 know one resolution at a time, Aria drops the
overview for crops, Idefics3 and SmolVLM shrink it from a picture already resized to the crops):
their overview at the lowest setting serves the decision only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.knobs import assign

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

SAME_AT_EVERY_SETTING = {"llama4": -1, "llava_next": 0, "molmo2": 0}
"""By `model_type`: where the overview is among an image's crops, for families whose overview is the
same whatever their number. Their towers treat each crop alone."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, positional and named."""
_PROJECTORS = ("multi_modal_projector", "connector", "embed_vision")


@dataclass(frozen=True)
class Overview:
    """The vision tower's output for an image's overview."""

    inputs: Call
    """Arguments of the tower's call, on the model's device: one row, as far as they are by row."""
    output: BaseModelOutput
    ms: float

    def pooled(self) -> Tensor:
        """Compute the mean over the patches of the tower's last hidden states, padding left out:
        float32 [d] on the CPU."""
        states = self.output.last_hidden_state.flatten(0, -2)
        mask = self.inputs[1].get("patch_attention_mask")
        if mask is not None:
            states = states[mask.flatten()]
        return states.float().mean(0).cpu()


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """Return the module that encodes images. Raises InputError if the model has none where models
    of transformers have theirs."""
    tower = model.get_encoder(modality="image")
    if tower in (model, model.base_model) or not hasattr(model.base_model, "get_image_features"):
        raise InputError(
            f"{type(model).__name__}: has no vision tower that HuggingFaceModel can find"
        )
    return tower


def vision_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the vision tower, and the projector that follows it where that is a module of its
    own."""
    modules: list[nn.Module | None] = [vision_tower(model)]
    for owner in (model.base_model, model):
        modules += [getattr(owner, name, None) for name in _PROJECTORS]
    return [module for module in dict.fromkeys(modules) if module is not None]


def encode_overview(
    model: PreTrainedModel, inputs: Mapping[str, Any], clock: Callable[[], float]
) -> Overview:
    """Take one image's overview through the vision tower alone.

    `inputs` are what the processor made of one request, on the model's device; `clock` is in ms,
    after the device has finished its work.
    """
    encode = model.base_model.get_image_features
    tower = vision_tower(model)
    # the model's own code prepares the call, which is then stopped
    known = {name: inputs[name] for name in inspect.signature(encode).parameters if name in inputs}
    try:
        with ExitStack() as stack:
            assign(stack, tower, "forward", _stop)
            encode(**known)
        raise AssertionError("the vision tower was not called")
    except _Reached as reached:
        call = reached.args
    if (row := SAME_AT_EVERY_SETTING.get(model.config.model_type)) is not None:
        count = _row_count(call)
        call = _picked(call, count, [row % count])
    start = clock()
    output = tower(*call[0], **call[1])
    return Overview(call, output, clock() - start)


@contextmanager
def going_on_from(model: PreTrainedModel, overviews: Sequence[Overview]) -> Iterator[set[int]]:
    """Reuse the output of overviews: in the context, the vision tower computes one crop less for
    each overview with the same pixels.

    Yield the indices of the overviews that were reused, complete at the end. For models of
    `SAME_AT_EVERY_SETTING`.
    """
    taken = set[int]()
    if not overviews:
        yield taken
        return
    tower = vision_tower(model)
    forward = tower.forward

    def remembered(*args: Any, **kwargs: Any) -> Any:
        call = (args, kwargs)
        count = _row_count(call)
        overview_of_row = {}
        for index, overview in enumerate(overviews):
            # each overview takes the place of one row; a tile with the same pixels is computed
            equal = _equal_rows(overview.inputs, call)
            if free := [row for row in equal if row not in overview_of_row]:
                overview_of_row[free[0]] = index
                taken.add(index)
        if not overview_of_row:
            return forward(*args, **kwargs)
        rest = [row for row in range(count) if row not in overview_of_row]
        parts = [overviews[index].output for index in overview_of_row.values()]
        if rest:
            args, kwargs = _picked(call, count, rest)
            # the rows that no overview has
            parts.insert(0, forward(*args, **kwargs))
        # where each row is in the joined output: first those that were computed
        order = torch.tensor([*rest, *overview_of_row]).argsort().to(tree_leaves(call)[0].device)
        return tree_map(
            lambda *rows: torch.cat(rows)[order] if isinstance(rows[0], Tensor) else rows[0], *parts
        )

    with ExitStack() as stack:
        assign(stack, tower, "forward", remembered)
        yield taken


class _Reached(Exception):
    """The vision tower was called with these arguments, positional and named."""


def _stop(*args: Any, **kwargs: Any) -> NoReturn:
    raise _Reached(args, kwargs)


def _row_count(call: Call) -> int:
    return next(len(leaf) for leaf in tree_leaves(call) if isinstance(leaf, Tensor))


def _picked(call: Call, count: int, rows: list[int]) -> Call:
    """Return the call with some of its rows, in all tensors whose first dimension is rows."""
    return tree_map(
        lambda leaf: (
            leaf[rows] if isinstance(leaf, Tensor) and leaf.shape[:1] == (count,) else leaf
        ),
        call,
    )


def _equal_rows(single_row: Call, many: Call) -> list[int]:
    """Return the rows of a call that equal the only row of another, in all their tensors."""
    # a row is equal if it is in every tensor
    equal = torch.ones(_row_count(many), dtype=torch.bool)
    for single, leaf in zip(tree_leaves(single_row), tree_leaves(many), strict=True):
        if isinstance(leaf, Tensor):
            if single.shape[1:] != leaf.shape[1:]:
                return []
            equal &= (leaf == single).reshape(len(leaf), -1).all(1).cpu()
    return equal.nonzero().flatten().tolist()
