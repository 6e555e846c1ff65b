"""The folder of a run: its name, whose it is while it is worked in, and the link to the latest."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from knobwise.envs.errors import InputError
from knobwise.envs.files import written_whole

UNFINISHED = ".unfinished"
"""Stands in a run's folder, locked, until its last step is done."""
LEFT_OUT_OF_NAME = ("experiment", "name", "runs", "tracking", "device", "threads", "jobs")


@contextlib.contextmanager
def claim(config: Any, overrides: list[str]) -> Iterator[Path]:
    """The folder of this run, new or that of the same run where it was stopped; ours alone until the block ends. When
    it ended well, `runs/latest` points at it.

    Args:
        config: settings with `runs`, `experiment` and `name`.
        overrides: the words of the command line, for the run's name.

    Raises:
        InputError: another process is at work in it, or `runs/latest` is something else than a link.
    """
    latest = Path(config.runs) / "latest"
    if latest.exists() and not latest.is_symlink():
        raise InputError(f"{latest} is not a link; move it away, or choose another runs=…")
    name = config.name or run_name(overrides)
    words = OmegaConf.to_yaml(asdict(config))
    folder, number = Path(config.runs) / config.experiment / name, 1
    while folder.exists():
        saved = folder / "config.yaml"
        if (folder / UNFINISHED).exists() and (not saved.exists() or saved.read_text() == words):
            break
        number += 1
        folder = Path(config.runs) / config.experiment / f"{name}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / UNFINISHED).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder}: another process is training this run; give yours another name=…") from None
        with written_whole(folder / "config.yaml") as temporary:
            temporary.write_text(words)
        yield folder
        _point(folder, latest)
        (folder / UNFINISHED).unlink()


def run_name(overrides: list[str]) -> str:
    """A readable name, the same for the same words: what differs from the defaults, or `default`."""
    kept = sorted(word for word in overrides if word.lstrip("+~").split("=")[0].split(".")[0] not in LEFT_OUT_OF_NAME)
    short = [word.split("=")[0] + "=" + Path(word.partition("=")[2]).name for word in kept]  # of a path its last part
    name = "_".join(re.sub(r"[^\w.,=-]+", "-", word).replace("=", "-").strip("-") for word in short)
    return name[:120] or "default"


def _point(folder: Path, link: Path) -> None:
    temporary = link.with_name(".latest-new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.absolute().relative_to(link.parent.absolute()))
    temporary.replace(link)
