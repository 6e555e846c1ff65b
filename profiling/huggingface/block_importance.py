"""How much a model's answers lose without each of its decoder blocks: read from a file, or measured.

The file is JSON, a number for each block: `{"4": 0.0156, "5": 0.0098, …}`. The larger, the later a block is left out;
only their order counts. Block 0 and others that always run need no number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.common.progress import progress
from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs
from knobwise.profiling.huggingface.loading import GREEDY, log_probs_of_answer
from knobwise.profiling.measuring.machine import write_json


def read_importance(path: str | Path) -> dict[int, float]:
    """Importance by block, in ascending order of blocks.

    Raises:
        InputError: no such file, not JSON, anything but a finite number for a block, a block given twice.
    """
    path = Path(path)
    try:
        # a tuple of pairs, so that a block which is given twice is seen
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=tuple, parse_int=float)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, tuple) or not content:
        raise InputError(f'{path}: must hold a number for each block, such as {{"4": 0.0156, "5": 0.0098}}')
    importance: dict[int, float] = {}
    for name, value in content:
        if not name.isascii() or not name.isdigit():
            raise InputError(f"{path}: {name!r} is not the number of a block")
        block = int(name)
        if block in importance:
            raise InputError(f"{path}: block {block} is given twice")
        if not isinstance(value, float) or not math.isfinite(value):
            raise InputError(f"{path}: the importance of block {block} is {value!r}, not a finite number")
        importance[block] = value
    return dict(sorted(importance.items()))


def measure_importance(
    knobs: HuggingFaceKnobs, score: Callable[[], float], path: str | Path | None = None
) -> dict[int, float]:
    """How much a score drops when one block alone is left out: score of the whole model − score without the block.

    Args:
        score: how good the model is as it is now, the more the better, such as `AnswerLikelihood`. Called once for the
            whole model and once for each block that can be left out.
        path: where to write what `read_importance` reads; None writes nothing.

    Raises:
        InputError: a score that is not finite; knobs that are set; nothing can be written to `path`.
    """
    blocks = [block for block in range(knobs.knobs[2].default) if block not in knobs.always_active]

    def scored(where: str) -> float:
        if not math.isfinite(value := score()):
            raise InputError(f"the score {where} is {value}, not a finite number")
        return float(value)

    whole = scored("of the whole model")
    importance: dict[int, float] = {}
    with progress("block importance", len(blocks), quiet_s=5.0) as tick:
        for done, block in enumerate(blocks, 1):
            with knobs.leaving_out([block]):
                importance[block] = whole - scored(f"without block {block}")
            tick(done, "")
    if path is not None:
        write_json(Path(path), {str(block): drop for block, drop in importance.items()})
    return importance


class AnswerLikelihood:
    """The mean log-likelihood of the answers that a model, as it is now, gives greedily: a score for
    `measure_importance`.

    (1/N) Σ_i (1/T_i) Σ_t ln P(answer_it | prompt_i, answer_i,<t), in nats per token; long answers count no more than
    short ones.

    Args:
        model: in eval mode.
        prompts: N times what the processor makes of one text and its images: `input_ids` int64 [1, L], … on the
            model's device.
        max_new_tokens: the most tokens of an answer.
        end_tokens: tokens that an answer ends with; None for the model's own.

    Raises:
        InputError: no prompts, or prompts of several texts.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Mapping[str, Tensor]],
        max_new_tokens: int = 16,
        end_tokens: Sequence[int] | None = None,
    ) -> None:
        if not prompts or any(len(prompt["input_ids"]) != 1 for prompt in prompts):
            raise InputError("the likelihood of answers needs prompts, each of one text")
        self.model, self.prompts = model, prompts
        self.answers = [self._greedy(prompt, max_new_tokens, end_tokens) for prompt in prompts]
        """The tokens of each, int64 [T]."""

    @torch.inference_mode()
    def __call__(self) -> float:
        pairs = zip(self.prompts, self.answers, strict=True)
        return float(torch.stack([log_probs_of_answer(self.model, *pair).mean() for pair in pairs]).mean())

    @torch.inference_mode()
    def _greedy(self, prompt: Mapping[str, Tensor], max_new_tokens: int, end_tokens: Sequence[int] | None) -> Tensor:
        stops = {} if end_tokens is None else {"eos_token_id": list(end_tokens)}
        output = self.model.generate(**prompt, **GREEDY, **stops, max_new_tokens=max_new_tokens)
        return torch.as_tensor(output[0, prompt["input_ids"].shape[1] :])
