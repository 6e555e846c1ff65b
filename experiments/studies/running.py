"""What the studies share: their command line, work in several processes, and measurements kept in files."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from scipy.stats import sem, t

from knobwise.common.errors import InputError
from knobwise.common.files import write_text
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.processes import in_processes
from knobwise.common.progress import progress
from knobwise.experiments.report import words
from knobwise.experiments.results.problem import FEASIBLE, GAP


def run_from_words(name: str, config: type, run: Callable[[Any], list[str]], arguments: Sequence[str]) -> int:
    """Run a study from `key=value` words; its `run` returns a line for each part that failed.

    Returns:
        the exit status: 2 for a wrong word, 1 when a part failed, 130 or 143 when a signal stopped it.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(arguments)))
        settings: Any = OmegaConf.to_object(merged)
        with stopped_by_signals():
            failed = run(settings)
    except (InputError, OmegaConfBaseException) as error:
        print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{name}: stopped; repeat the command to resume", file=sys.stderr)
        return status_of(stop)
    for line in failed:
        print(f"{name}: {line}", file=sys.stderr)
    print(f"page: {settings.out}")
    return 1 if failed else 0


class Mean(NamedTuple):
    """A mean and half the width of its 95 % interval (Student's t), NaN for a single value."""

    value: float
    half: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Mean:
        numbers = np.array(list(values), dtype=float)
        half = t.ppf(0.975, len(numbers) - 1) * sem(numbers) if len(numbers) > 1 else np.nan
        return cls(float(numbers.mean()), float(half))

    def words(self, form: str = ".3f") -> str:
        return f"{self.value:z{form}} ± {self.half:{form}}"

    @property
    def sign(self) -> int:
        """1 or −1 where it differs from 0 by more than its interval, else 0."""
        return words.sign_of((self.value - self.half, self.value + self.half))


def rendered(template: str, **values: Any) -> str:
    """A page of Markdown, from a template beside this file; it knows the words of reports too."""
    environment = Environment(  # Markdown, not HTML
        loader=PackageLoader("knobwise.experiments.studies", "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = words.number
    environment.globals |= {"gap": GAP.name, "feasible": FEASIBLE.name, "STATIC": words.STATIC, "ORACLE": words.ORACLE}
    return environment.get_template(template).render(**values)


def in_turn(title: str, work: Callable[..., str], pieces: Sequence[tuple[Any, ...]], jobs: int, done: int) -> list[str]:
    """Call `work(*piece)` for every piece, in `jobs` processes; with one job in this process. Returns the notes."""
    if jobs > 1:
        return in_processes(title, work, pieces, jobs, done)
    notes: list[str] = []
    with progress(title, done + len(pieces), done) as tick:
        for piece in pieces:
            notes.append(work(*piece))
            tick(done + len(notes), notes[-1])
    return notes


def folder_for(runs: str, settings: Any) -> Path:
    """Where measurements with these settings are kept; other settings have another folder."""
    folder = Path(runs) / hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measured(title: str, work: Callable[..., Any], cells: Mapping[Path, tuple[Any, ...]], jobs: int) -> list[Any]:
    """The measurements in these files, made by `work(*arguments)` where a file is missing."""
    missing = [(work, path, *arguments) for path, arguments in cells.items() if not path.exists()]
    in_turn(title, _measure, missing, jobs, len(cells) - len(missing))
    return [json.loads(path.read_text(encoding="utf-8")) for path in cells]


def _measure(work: Callable[..., Any], path: Path, *arguments: Any) -> str:
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    with quiet(), threadpool_limits(1):
        result = work(*arguments)
    write_text(path, json.dumps(result))
    return path.stem


@contextmanager
def quiet() -> Iterator[None]:
    """No output from what runs inside: the study shows its own progress."""
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        yield
