"""Train a small model from scratch, so that an interrupted training ends in the same place; and the file of weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from knobwise.common.errors import InputError
from knobwise.common.files import written_whole
from knobwise.common.interruption import held_back
from knobwise.common.progress import progress
from knobwise.envs.tables.tensor_file import tensors_and_metadata


def train_resumably(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    state: Path,
    settings: Mapping[str, Any],
    *,
    what: str,
    steps: int,
    learning_rate: float,
    rise: int,
    save_every_s: float,
) -> float:
    """Train with AdamW, or resume from the checkpoint at `state`; return the CPU seconds of all sessions. A resumed
    training ends where an uninterrupted one does, if a batch depends on the number of its step alone.

    The model is trained in place, and in evaluation mode afterwards. `loss_of` gives the loss, a scalar, of the batch
    of a step; `what` is the title of the progress line. At step t the rate is `learning_rate` · min(1, (t + 1) /
    `rise`), and times a cosine from 1 to 0.03. Raises InputError if the checkpoint belongs to a training with other
    `settings`.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    identity = {"format": "knobwise.training/1", **json.loads(json.dumps(settings))}
    step, start = 0, process_time()
    if state.exists():
        saved = torch.load(state, weights_only=True)
        if saved["identity"] != identity:
            raise InputError(f"{state}: belongs to a training with other settings; remove it or choose another folder")
        model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
        step, start = saved["step"], start - saved["cpu_s"]
    model.train()
    saved_at, mean_loss = monotonic(), math.nan
    with held_back() as held, progress(what, steps, step) as tick:
        while step < steps:
            rate = min(1.0, (step + 1) / rise) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * rate
            loss = loss_of(step)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            step += 1
            mean_loss = loss.item() if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss.item()
            tick(step, f"loss {mean_loss:.2f}")
            if monotonic() - saved_at > save_every_s or step == steps or held.number is not None:
                tensors = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
                with held.undisturbed(), written_whole(state) as temporary:
                    cpu_s = process_time() - start
                    torch.save({"identity": identity, "step": step, "cpu_s": cpu_s, **tensors}, temporary)
                saved_at = monotonic()
            held.check()
    model.eval()
    return process_time() - start


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write weights in half precision."""
    with written_whole(path) as temporary:
        save_file({name: x.half().contiguous() for name, x in model.state_dict().items()}, temporary, metadata)


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights in single precision, and the metadata, as `save_weights` wrote them."""
    weights, metadata = tensors_and_metadata(path)
    return {name: weight.float() for name, weight in weights.items()}, metadata
