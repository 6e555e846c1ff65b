"""What made the files in `testbeds/data`, a command for each. Not in the wheel: nothing else here
imports it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from knobwise.common.errors import InputError


def to_out(description: str, write: Callable[[Path], None]) -> None:
    """Call `write` with the path that the command line gives as `--out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="file or folder to write")
    try:
        write(parser.parse_args().out)
    except InputError as error:
        parser.error(str(error))
