"""Set crops, experts and blocks of a Hugging Face model for a while.

A few attributes of model and processor get other values. At the end they get their own values back.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.common.json_text import read_json
from knobwise.profiling.huggingface.families import FAMILIES, Assignment, ModelKnob, crops_knob
from knobwise.profiling.measuring.adaptive_model import (
    Configuration,
    KnobSupport,
    check_configuration,
)

if TYPE_CHECKING:
    from transformers import (
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

TOP_K_IN_CONFIGURATION = {"gemma4_text": "top_k_experts"}
"""Language models whose routers read the number of experts from the configuration, not from
themselves."""


class HuggingFaceKnobs:
    """The knobs of an image-text-to-text model of transformers and its processor.

    - `max_crops`: see `knobwise.profiling.huggingface.families`.
    - `top_k`: the experts that every router of the language model chooses for a token. Weights are
      normalised as the router itself does it.
    - `num_active_blocks`: the decoder blocks that run; the others pass their input on and write
      nothing to the cache of keys and values. The first block always runs, and so does every block
      from whose cache others read positions, masks, keys or values; so generation with a cache
      gives what generation without one gives. What a family adds to hidden states between its
      blocks (Qwen3-VL's deepstack) is still added.

    Blocks are left out in the order of `importance`, the least important first. Without it the last
    but one goes first, then the one before it, and so on; the last goes last: deep blocks matter
    least, except for the final ones (Gromov et al., 2024, https://arxiv.org/abs/2403.17887).

    A model whose type is unknown gets `top_k` and `num_active_blocks` if its decoder has a plain
    list of blocks.

    Args:
        model: the model.
        processor: its processor.
        importance: block → how much the answers lose without it, for every block that can be left
            out (`read_importance` reads it from a file).

    Raises:
        InputError: the decoder's blocks are not found; or the importance lacks a block, or names
            one that does not exist.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        importance: Mapping[int, float] | None = None,
    ) -> None:
        self.model = model
        self._language = model.config.get_text_config(decoder=True)
        self._blocks = _decoder_blocks(model)
        self._in_use = Lock()
        self.always_active = _read_by_others(self._language, self._blocks)
        """Blocks that cannot be left out, in ascending order, from block 0 on."""
        self._leaving = self._order_of_leaving(importance)
        # a knob more is a line here: its values, and what to assign to set one
        self._knobs = (crops_knob(model, processor), self._experts_knob(), self._blocks_knob())
        self.knobs = tuple(knob.support for knob in self._knobs)

    @contextmanager
    def set(self, configuration: Configuration) -> Iterator[None]:
        """Run model and processor with this configuration inside the context.

        Both are restored when the context ends, also by an exception. One context must last from
        the processor's call to the last token of an answer.

        Raises:
            InputError: a value cannot be set, or another context of this model has not ended.
        """
        values = check_configuration(self.knobs, configuration)
        if not self._in_use.acquire(blocking=False):
            raise InputError(
                "this model's knobs are set already; leave that context before setting them again"
            )
        with ExitStack() as stack:
            stack.callback(self._in_use.release)
            for knob in self._knobs:
                value = values[knob.support.name]
                # a knob at its default is left alone
                if value != knob.support.default:
                    for owner, name, changed in knob.assignments(value):
                        assign(stack, owner, name, changed)
            yield

    def active_blocks(self, count: int) -> tuple[int, ...]:
        """Return the blocks that run when `count` blocks are active, in ascending order."""
        total = len(self._blocks)
        left_out = self._leaving[: total - count]
        return tuple(block for block in range(total) if block not in left_out)

    def _order_of_leaving(self, importance: Mapping[int, float] | None) -> list[int]:
        """Return the blocks that can be left out, in the order in which they go."""
        total = len(self._blocks)
        # from the last block to block 1
        free = [block for block in range(total - 1, 0, -1) if block not in self.always_active]
        if importance is None:
            # the last block goes last
            return sorted(free, key=lambda block: block == total - 1)
        if not set(free) <= importance.keys() <= set(range(total)):
            raise InputError(
                f"importance of blocks {', '.join(map(str, importance))}: this model needs that of "
                f"{', '.join(map(str, sorted(free)))}"
            )
        return sorted(free, key=lambda block: importance[block])  # of equals the deeper first

    def _experts_knob(self) -> ModelKnob:
        # the routers, or the configuration, hold the number
        name = TOP_K_IN_CONFIGURATION.get(self._language.model_type, "top_k")
        parts = self._blocks.modules()
        if name != "top_k":
            parts = iter([self._language])
        owners = [part for part in parts if isinstance(vars(part).get(name), int)]
        if not owners:
            note = "this model has no experts: its feed-forward layers are dense"
            return ModelKnob(KnobSupport("top_k", 0, note=note), lambda value: [])
        # the most that every router can choose
        most = min(_choosable(owner, self._language) for owner in owners)
        default = max(int(getattr(owner, name)) for owner in owners)
        support = KnobSupport("top_k", default, 1, most, "experts for each token")
        return ModelKnob(support, lambda value: [(owner, name, value) for owner in owners])

    def _blocks_knob(self) -> ModelKnob:
        total = len(self._blocks)

        def assignments(count: int) -> list[Assignment]:
            # the first block always runs, and shows what kind of output the decoder expects
            first = self._blocks[0]
            identity = _Identity(first.forward)
            changed: list[Assignment] = [(first, "forward", identity.run_first)]
            active = self.active_blocks(count)
            for index, block in enumerate(self._blocks):
                if index not in active:
                    changed.append((block, "forward", identity))
            return changed

        sets = f"decoder blocks that run, always {', '.join(map(str, self.always_active))}"
        support = KnobSupport("num_active_blocks", total, len(self.always_active), total, sets)
        return ModelKnob(support, assignments)


class _Identity:
    """It replaces the forward pass of a block that is left out, and passes the input on in the form
    in which the other blocks return their output."""

    def __init__(self, first: Callable[..., Any]) -> None:
        self._first = first
        self._others: tuple[None, ...] | None = None

    def run_first(self, *inputs: Any, **named: Any) -> Any:
        """Run the first block, and note how many outputs it has besides the hidden states."""
        output = self._first(*inputs, **named)
        if isinstance(output, tuple):
            self._others = (None,) * (len(output) - 1)
        return output

    def __call__(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> Any:
        if self._others is None:
            return hidden_states
        return (hidden_states, *self._others)


def assign(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Give an attribute another value until the stack closes.

    If only the class had the attribute, it is then deleted from the object again.
    """
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _decoder_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the blocks of the language model, in order."""
    part = None
    if not getattr(model.config, "is_encoder_decoder", False):
        part = model.get_decoder()
    while isinstance(part, nn.Module):
        blocks = getattr(part, "layers", None)
        if isinstance(blocks, nn.ModuleList) and all(map(_takes_hidden_states, blocks)):
            return blocks
        part = getattr(part, "model", None)  # a language model with its head
    raise InputError(
        f"the decoder blocks of a model of type {model.config.model_type!r} cannot be found; "
        f"known are {', '.join(FAMILIES)}. For another model implement "
        "knobwise.profiling.measuring.adaptive_model.AdaptiveVLM"
    )


def _takes_hidden_states(block: nn.Module) -> bool:
    return list(inspect.signature(type(block).forward).parameters)[1:2] == ["hidden_states"]


def _read_by_others(language: PreTrainedConfig, blocks: nn.ModuleList) -> tuple[int, ...]:
    """Return the blocks whose cache other blocks read.

    Positions and the masks of each kind of attention are read from the first block of that kind.
    Keys and values that later blocks share are read from the blocks that store them.
    """
    from transformers import DynamicCache
    from transformers.masking_utils import find_first_full_attention_index

    # generation asks the same cache
    cache = DynamicCache(config=language)
    blocks_read = {0, find_first_full_attention_index(cache)}
    if True in cache.is_sliding:
        blocks_read.add(cache.is_sliding.index(True))
    if getattr(language, "num_kv_shared_layers", 0):
        for index, block in enumerate(blocks):
            stores = [getattr(part, "store_full_length_kv", False) for part in block.modules()]
            if any(stores):
                blocks_read.add(index)
    return tuple(sorted(blocks_read))


def _choosable(owner: nn.Module, language: PreTrainedConfig) -> int:
    """Return the most experts that a router can choose for a token."""
    experts = int(getattr(owner, "num_experts", None) or language.num_experts)
    # routers of some families choose within groups of experts
    groups = getattr(owner, "num_group", 1) or 1
    chosen = getattr(owner, "topk_group", 1) or 1
    return experts // groups * chosen


def read_importance(path: str | Path) -> dict[int, float]:
    """Read how much a model's answers lose without each of its decoder blocks, by block, in
    ascending order of blocks.

    The file is JSON, a number for each block: `{"4": 0.0156, "5": 0.0098, …}`. The larger, the
    later a block is left out; only their order counts. Block 0 and others that always run need no
    number. Raises InputError for no such file, not JSON, anything but a finite number for a block,
    a block given twice.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content:
        raise InputError(
            f'{path}: must hold a number for each block, such as {{"4": 0.0156, "5": 0.0098}}'
        )
    for block, value in content.items():
        number = type(value) in (int, float) and math.isfinite(value)
        if not (number and block.isascii() and block.isdigit()):
            raise InputError(
                f"{path}: the importance of block {block!r} is {value!r}; give a finite number for "
                "the number of each block"
            )
    return {int(block): float(content[block]) for block in sorted(content, key=int)}
