"""Files and folders that people's tools write, recognised by what they hold.

A format is a module with one function, from paths to `ToolRows`, and an entry in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from knobwise.envs.readers.evalscope import holds_evalscope, read_evalscope
from knobwise.envs.readers.frames import read_frame
from knobwise.envs.readers.google_benchmark import (
    holds_google_benchmark,
    read_google_benchmark,
)
from knobwise.envs.readers.inspect_logs import (
    holds_inspect_logs,
    inspect_frame,
    is_inspect_frame,
    read_inspect_logs,
)
from knobwise.envs.readers.joined_files import join_files
from knobwise.envs.readers.nested import unnest
from knobwise.envs.readers.promptfoo import holds_promptfoo, read_promptfoo
from knobwise.envs.readers.tool_rows import ToolRows, as_table

BUDGET = "latency_budget"
"""The column that only training examples of the original system have."""
FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[[Sequence[Path], list[str]], ToolRows]]]
FORMATS = {
    "promptfoo": (holds_promptfoo, read_promptfoo),
    "inspect-ai": (holds_inspect_logs, read_inspect_logs),
    "evalscope": (holds_evalscope, read_evalscope),
    "google-benchmark": (holds_google_benchmark, read_google_benchmark),
}
"""Tool → whether a path is of this tool, and its reader, which takes several paths at once."""


def read_files(
    paths: Sequence[Path], choices: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Read a file of any format, or several.

    Files of one tool are stacked; a file of scores and one of times are joined.

    Args:
        paths: files, or folders of a tool.
        choices: options of `long_table.table_from_frame`.
        notes: takes what is noticed.

    Returns:
        The rows, and the options that read them.

    Raises:
        InputError: a path cannot be read, or two files cannot be joined.
    """
    tools = [tool_of(path) for path in paths]
    if tools[0] is not None and len(set(tools)) == 1:
        rows = FORMATS[tools[0]][1](paths, notes)
        return as_table(rows, choices, notes)
    if len(paths) == 1:
        return of_frame(read_frame(paths[0], notes), choices, notes)
    parts: list[tuple[str, pl.DataFrame | ToolRows]] = []
    for path, tool in zip(paths, tools, strict=True):
        if tool is None:
            parts.append((path.name, unnest(read_frame(path, notes))))
        else:
            parts.append((path.name, FORMATS[tool][1]([path], notes)))
    return join_files(parts, choices, notes)


def of_frame(
    frame: pl.DataFrame, choices: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return rows and options as `read_files` does, of a data frame that a tool may have
    made."""
    if is_inspect_frame(frame.columns):
        return as_table(inspect_frame(frame, notes), choices, notes)
    if BUDGET in frame.columns:
        # the objects of training examples have names of their own
        return frame, choices
    return unnest(frame), choices


def tool_of(path: Path) -> str | None:
    """Return the tool that wrote a file or folder, or None if it is not known."""
    if not path.exists():
        return None
    for tool, (holds, _) in FORMATS.items():
        if holds(path):
            return tool
    return None
