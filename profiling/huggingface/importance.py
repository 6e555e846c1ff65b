"""How much the answers of a model lose without each of its decoder blocks, from a file."""

from __future__ import annotations

import math
from pathlib import Path

from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_records import read_json


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
        if not (block.isascii() and block.isdigit()):
            raise InputError(f"{path}: {block!r} is not the number of a block")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(
                f"{path}: the importance of block {block} is {value!r}, not a finite number"
            )
    return {int(block): float(content[block]) for block in sorted(content, key=int)}
