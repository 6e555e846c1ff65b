"""Files and folders that people's tools write, recognised by what they hold.

A format is a module with one function, from paths to `ToolRows`, and an entry in `FORMATS`. Only
the module of a format that was recognised is asked anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from knobwise.envs.readers import evalscope, google_benchmark, inspect_logs, promptfoo
from knobwise.envs.readers.column_values import narrowed
from knobwise.envs.readers.frames import read_frame
from knobwise.envs.readers.joined_files import join_files
from knobwise.envs.readers.nested import unnest
from knobwise.envs.readers.raw_files import beginning
from knobwise.envs.readers.tool_rows import ToolRows, as_table

BUDGET = "latency_budget"
"""The column that only training examples of the original system have."""


class Format(NamedTuple):
    """How files and folders of a tool are told from others, and read."""

    read: Callable[[Sequence[Path], list[str]], ToolRows]
    """Its reader, which takes several paths at once."""
    begins: re.Pattern[str] | None = None
    """How its files of text begin."""
    suffix: str | None = None
    """The end of the name that only its files have."""
    holds: Callable[[Path], object] | None = None
    """Whether a folder is one of the tool's."""


FORMATS = {
    "promptfoo": Format(promptfoo.read_promptfoo, promptfoo.BEGINS),
    "inspect-ai": Format(
        inspect_logs.read_inspect_logs,
        inspect_logs.BEGINS,
        inspect_logs.ZIPPED,
        inspect_logs.logs_in,
    ),
    "evalscope": Format(evalscope.read_evalscope, holds=evalscope.is_output_folder),
    "google-benchmark": Format(google_benchmark.read_google_benchmark, google_benchmark.BEGINS),
}
"""Tool → its format."""


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
        rows = FORMATS[tools[0]].read(paths, notes)
        return as_table(rows, choices, notes)
    if len(paths) == 1:
        return of_frame(read_frame(paths[0], notes, narrow=narrowed), choices, notes)
    parts: list[tuple[str, pl.DataFrame | ToolRows]] = []
    for path, tool in zip(paths, tools, strict=True):
        if tool is None:
            parts.append((path.name, unnest(read_frame(path, notes))))
        else:
            parts.append((path.name, FORMATS[tool].read([path], notes)))
    return join_files(parts, choices, notes)


def of_frame(
    frame: pl.DataFrame, choices: dict[str, Any], notes: list[str]
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Return rows and options as `read_files` does, of a data frame that a tool may have
    made."""
    scored = any(name.startswith(inspect_logs.SCORE) for name in frame.columns)
    if scored and {*frame.columns} >= inspect_logs.FRAME:
        return as_table(inspect_logs.inspect_frame(frame, notes), choices, notes)
    if BUDGET in frame.columns:
        # the objects of training examples have names of their own
        return frame, choices
    return unnest(frame), choices


def tool_of(path: Path) -> str | None:
    """Return the tool that wrote a file or folder, or None if it is not known."""
    if path.is_dir():
        folders = {tool: each.holds for tool, each in FORMATS.items() if each.holds}
        return next((tool for tool, holds in folders.items() if holds(path)), None)
    begin = beginning(path)
    for tool, each in FORMATS.items():
        if each.suffix == path.suffix and path.exists():
            return tool
        if each.begins and each.begins.match(begin):
            return tool
    return None
