"""Measure a model: scenes, an elastic vision-language model, and the runner that turns both into a
profile."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from knobwise.common.errors import InputError

DATA = Path(__file__).with_name("data")
"""The files that come with knobwise."""


def to_out(description: str, write: Callable[[Path], None]) -> None:
    """Call `write` with the path that the command line gives as `--out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="file or folder to write")
    try:
        write(parser.parse_args().out)
    except InputError as error:
        parser.error(str(error))
