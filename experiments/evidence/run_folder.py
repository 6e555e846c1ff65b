"""The folder of a run: its name, its lock, how a stopped run resumes, the link to the latest run,
and the controller that it deploys."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from knobwise import agents
from knobwise.agents.deployed.controller import NumpyController
from knobwise.common.checks import folder_name
from knobwise.common.errors import InputError
from knobwise.common.files import (
    FULL,
    is_damaged,
    lock_folder,
    lock_handle,
    replace_link,
    sync,
    write_text,
)
from knobwise.common.progress import say
from knobwise.experiments.evidence.exports import CONTROLLER, exported_of
from knobwise.experiments.settings.config_file import NAME as CONFIG
from knobwise.experiments.settings.config_file import read_settings_file, settings_text
from knobwise.serving.knob_policy import KnobPolicy

if TYPE_CHECKING:
    from knobwise.agents.training.checkpoint import Loaded
    from knobwise.envs.bandit.rules import Rule
    from knobwise.experiments.settings.tracking import Training

UNFINISHED = ".unfinished"
"""A locked file in a run's folder until its last step is done."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""What the locked file holds when it is whole, see `_digest`."""
VERSION = "controller.pt"
"""The checkpoint in a version that `knobwise update` wrote."""
LONGEST_NAME = 60
"""The most characters of a folder's name that is made from options."""
LEFT_OUT_OF_NAME = ("experiment", "name", "runs", "tracking", "device", "threads", "jobs")
"""Settings that do not change the results, or have their place in the path."""


def checkpoint_at(path: str | Path) -> Path:
    """Return the checkpoint at a path: the file itself, that of a version of `knobwise update`, or
    that of a run's best seed on validation.

    Raises:
        InputError: a run that is not finished.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    if (path / VERSION).exists():
        return path / VERSION
    if (path / UNFINISHED).exists():
        raise InputError(f"{path}: the run is not finished; repeat its command to resume it")
    return path / "checkpoints" / "best.pt"


def policy_at(path: str | Path, rule: str | type[Rule] | None = None) -> KnobPolicy:
    """Load the policy of a checkpoint, a version or a run; for `rule` see `load_checkpoint`.

    A folder whose controller was exported from its checkpoint needs no torch: the checkpoint is
    read once somebody asks for the network.

    Raises:
        InputError: see `checkpoint_at`, `load_checkpoint` and `KnobPolicy`.
    """
    checkpoint = checkpoint_at(path)
    if rule is None and Path(path).is_dir():
        exported = exported_of(checkpoint, Path(path))
        if exported is not None:
            return KnobPolicy(partial(_content_of, checkpoint), exported)
    return KnobPolicy(agents.load_checkpoint(checkpoint, rule))


def _content_of(checkpoint: Path) -> Loaded:
    return agents.load_checkpoint(checkpoint)


def controller_at(path: str, rule: str | None = None) -> NumpyController:
    """Load an exported `.npz` or the folder that holds it; or what a checkpoint or a run deploys,
    see `policy_at`."""
    exported = Path(path, CONTROLLER)
    if exported.exists() and not Path(path, "checkpoints").exists():
        path = str(exported)
    if not path.endswith(".npz"):
        return policy_at(path, rule).decider
    try:
        return NumpyController.load(path)
    except (OSError, ValueError) as error:
        raise InputError(f"checkpoint={path}: {error}") from error


@contextlib.contextmanager
def claim_folder(config: Training, overrides: list[str]) -> Iterator[Path]:
    """Lock the folder of this run until the block ends: a new one, or the folder of the same run if
    it was stopped. After success `runs/latest` points at it.

    Args:
        config: settings with `runs`, `experiment` and `name`.
        overrides: the words of the command line, for the run's name.

    Raises:
        InputError: a name that is not a folder's, another process is at work in it, or
            `runs/latest` is not a link.
    """
    for key, name in (("name", config.name), ("experiment", config.experiment)):
        if name is not None:
            folder_name(key, name)
    latest = Path(config.runs) / "latest"
    if latest.exists() and not latest.is_symlink():
        raise InputError(f"{latest} is not a link; move it away, or choose another runs=…")
    experiment = latest.with_name(config.experiment)
    settings = settings_text(config)
    try:
        with lock_folder(experiment):
            for folder in _candidates(config, overrides):
                lock = _made(folder, settings)
                if lock is not None:
                    _say_kept(next(_candidates(config, overrides)), folder, settings)
                    break
                lock = _taken_up(folder, settings)
                if lock is not None:
                    break
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InputError(
            f"{experiment}: cannot be written ({error.strerror}); choose another runs=…"
        ) from error
    assert lock is not None
    with lock:
        if _saved(folder) != settings.encode():
            say(f"{folder / CONFIG}: is missing or damaged; it is written again")
            write_text(folder / CONFIG, settings)
        try:
            yield folder
        except KeyboardInterrupt as stop:
            stop.add_note(f"what is finished is kept in {folder}")
            raise
        with lock_folder(latest.parent):
            replace_link(latest, folder.absolute().relative_to(latest.parent.absolute()))
        (folder / UNFINISHED).unlink()
        sync(folder)


def _candidates(config: Training, overrides: list[str]) -> Iterator[Path]:
    """Yield the folders that a run may have: the first one, and with -2, -3 and so on behind its
    name if other runs have taken it."""
    first = Path(config.runs) / config.experiment / (config.name or run_name(overrides))
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def _say_kept(first: Path, folder: Path, settings: str) -> None:
    """Say why a new run does not have the first of its names, if it has another one."""
    if folder != first:
        reason = "is another run"
        if _saved(first) == settings.encode():
            reason = "is finished"
        say(f"{first}: {reason} and is kept; this is a new run: {folder}")


def _saved(folder: Path) -> bytes:
    """Return the settings that a folder holds."""
    if (folder / CONFIG).exists():
        return (folder / CONFIG).read_bytes()
    return b""


def _made(folder: Path, settings: str) -> TextIO | None:
    """Make the folder with its lock and its settings, and return the lock; None if there is one. A
    process that was killed before it made the lock left an empty folder."""
    if folder.is_file() or any(folder.glob("*")):
        return None
    folder.mkdir(exist_ok=True)
    lock = (folder / UNFINISHED).open("w")
    lock_handle(lock.fileno())
    # the lock holds a digest of the settings, in case that their file is damaged
    lock.write(_digest(settings))
    lock.flush()
    sync(folder / UNFINISHED)
    write_text(folder / CONFIG, settings)
    sync(folder.parent)
    return lock


def _taken_up(folder: Path, settings: str) -> TextIO | None:
    """Lock an unfinished folder of the same settings and return the lock; None for any other
    folder. After a power cut the file of the settings may be damaged, or the lock."""
    if not (folder / UNFINISHED).exists():
        return None
    lock = (folder / UNFINISHED).open("r+", errors="replace")
    digest = _digest(settings)
    noted = lock.read()
    if torn := not DIGEST.fullmatch(noted):
        same = _is_of(folder, settings, noted)
    else:
        same = noted == digest
    if same and lock_handle(lock.fileno(), blocking=False):
        if (folder / UNFINISHED).exists():
            if torn:
                lock.seek(0)
                lock.truncate()
                lock.write(digest)
                lock.flush()
            return lock
        same = False  # it has just been finished
    lock.close()
    if same:
        raise InputError(
            f"{folder}: another process is training this run; give yours another name=…"
        )
    return None


def _is_of(folder: Path, settings: str, noted: str) -> bool:
    """Tell whether a folder whose lock is torn is of these settings, and say how that is known: by
    the settings in it, else by what is left of the lock."""
    torn = f"{folder / UNFINISHED}: is torn, so it does not say whose unfinished run this is"
    if _saved(folder) == settings.encode():
        say(f"{torn}; the settings in {CONFIG} are those of this command, so it goes on")
        return True
    try:
        read_settings_file(folder / CONFIG)
    except InputError:
        # a process that was killed may have left an empty lock or the beginning of its digest, and
        # a power cut zeros
        if _digest(settings).startswith(noted.rstrip("\0")):
            say(f"{torn}; what is left of it fits this command, so it goes on")
            return True
        say(
            f"{torn}, and {CONFIG} there is missing or damaged; it is left alone. To resume it, "
            f"restore {CONFIG} and repeat its command"
        )
    else:
        say(
            f"{torn}; {CONFIG} there holds other settings, so it is left alone. To resume it, "
            "repeat its own command"
        )
    return False


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()


def command_of(overrides: list[str]) -> str:
    """Return the command with these words, as a shell takes it."""
    return shlex.join(["knobwise", "train", *overrides])


def finished_run(config: Training, overrides: list[str], digest: str) -> Path | None:
    """Return the finished run of these settings on the data with this digest, None if there is
    none."""
    settings = settings_text(config).encode()
    for folder in itertools.takewhile(Path.exists, _candidates(config, overrides)):
        results = folder / "results.json"
        if (folder / UNFINISHED).exists() or not results.exists():
            continue
        # damaged files are those of another run
        with contextlib.suppress(OSError, ValueError):
            profile = json.loads(results.read_bytes())["profile"]
            if _saved(folder) == settings and profile["digest"] == digest:
                return folder
    return None


def taken_up_if_damaged(folder: Path) -> bool:
    """Look whether the checkpoints of a finished run are whole.

    Where one is not, the run counts as unfinished again: `claim_folder` then takes it up, and
    training goes on from what is whole.

    Returns:
        True where one is damaged.
    """
    damaged = [path for path in sorted(folder.rglob("*.pt")) if is_damaged(path)]
    for path in damaged:
        say(f"{path}: is damaged; it is made again from what is whole of this run")
    if damaged:
        write_text(folder / UNFINISHED, _digest((folder / CONFIG).read_text(encoding="utf-8")))
    return bool(damaged)


def run_name(overrides: list[str]) -> str:
    """Return a readable name, equal for equal words: the changed settings, or `default`. A long
    name does without the sections of the settings, and a digest replaces its end."""
    # the words in order, so that equal settings have equal names
    changed = []
    for word in sorted(words_in_name(overrides)):
        key, _, value = word.partition("=")
        changed.append((key, Path(value).name))  # the last part of a path
    name = "_".join(_as_in_a_name(f"{key}={value}") for key, value in changed)
    if len(name) > LONGEST_NAME:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        short = "_".join(_as_in_a_name(f"{key.split('.')[-1]}={value}") for key, value in changed)
        name = f"{short[: LONGEST_NAME - len(digest) - 1].rstrip('_')}-{digest}"
    return name or "default"


def words_in_name(overrides: list[str]) -> list[str]:
    """Return the words that a name is made from: those that may change the results."""
    return [
        word
        for word in overrides
        if word.partition("=")[0].lstrip("+~").split(".")[0] not in LEFT_OUT_OF_NAME
    ]


def _as_in_a_name(word: str) -> str:
    """Return a word of the command line with `-` for what a file should not have in its name."""
    return re.sub(r"[^\w.=-]+", "-", word).replace("=", "-").strip("-")
