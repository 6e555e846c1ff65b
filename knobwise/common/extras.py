"""How packages that only some commands need are installed."""

from __future__ import annotations

from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
"""The root of a clone; of an installed wheel, the folder of all packages."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of setup.cfg: in a clone, from the clone.

    The installed package tells pip what its own extras are.
    """
    if (CLONE / "setup.cfg").exists():
        return f"pip install -e '.[{extra}]'"
    return f"pip install 'knobwise[{extra}]'"
