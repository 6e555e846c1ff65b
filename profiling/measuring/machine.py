"""Describe the machine that measures, and claim and fill the folder that a run measures into."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from knobwise.common.errors import InputError
from knobwise.common.files import is_cut_short, write_text
from knobwise.common.json_text import decode_json
from knobwise.common.memory import keep_freed_memory

T = TypeVar("T")
SOURCE = "source_sha256"
"""What a note calls the SHA-256 of the file that a model is written in."""
KEPT = 1 << 30
"""Bytes of freed memory that a process that measures keeps."""


def claim_machine(path: Path, identity: Mapping[str, Any], source: Path | None = None) -> bool:
    """Note in ``path`` what is being measured; return whether a run was begun there with another
    content of the file `source`, which an older note does not tell.

    Raises InputError if a run with other settings was begun there."""
    # as it will be read back: tuples become lists
    wanted = json.loads(json.dumps(identity))
    digest = source and hashlib.sha256(source.read_bytes()).hexdigest()
    note = wanted | ({SOURCE: digest} if digest else {})
    if not path.exists() or is_cut_short(path.read_bytes(), _json(note)):
        write_readable_json(path, note)
        return False
    noted = read_note(path, dict)
    before = noted.pop(SOURCE, digest)
    # what differs, by name, in the order of the note
    differences = [
        f"{key}: {noted.get(key)} → {wanted.get(key)}"
        for key in {**noted, **wanted}
        if noted.get(key) != wanted.get(key)
    ]
    if differences:
        raise InputError(
            f"{path.parent} holds a run with other settings ({'; '.join(differences)}); choose "
            "another out folder"
        )
    return before != digest


def read_note(path: Path, kind: Callable[[Any], T]) -> T:
    """Read a JSON file of an earlier call as a list or a dictionary. Raises InputError if it is
    damaged."""
    try:
        return kind(decode_json(path.read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: is damaged ({error}); choose another out folder, or delete the file"
        ) from error


def write_readable_json(path: str | Path, content: Any) -> None:
    """Write a file that people read too."""
    write_text(path, _json(content))


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Compute the SHA-256 of files of a folder, by name."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on products this small more threads only wait for each other. Freed
    memory is kept (`keep_freed_memory`)."""
    threads = torch.get_num_threads()
    keep_freed_memory(KEPT)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_name() -> str:
    """Return the model name of this machine's processor."""
    known = platform.processor()
    # that is empty on most Linux systems
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        known = (names or [known])[0]
    return known or "unknown"


def machine() -> dict[str, Any]:
    """Return what latencies depend on besides the model: processor, accelerator, threads, torch."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
