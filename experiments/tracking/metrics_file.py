"""metrics.csv: every number of a run except its speed, readable without any tool. Equal runs leave
equal files."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from knobwise.common.files import locked, sync, written_whole
from knobwise.common.progress import say

Row = tuple[int, dict[str, float]]
"""A step, and the numbers that were logged of it, by name."""


class MetricsFile:
    """`metrics.csv`: one row per seed and call, columns seed, step and every name logged so far.

    A new name widens the file (it is rewritten whole). Rows are on disk when `append` returns.
    Several processes, each with its own seed, may write to one file.

    Args:
        seed: the seed whose rows are appended; None for rows of all seeds together.
        resume_step: the last step to keep of this seed; None to keep none.
        known: the rows of this seed up to `resume_step`, from its checkpoints. Rows that the file
            has lost are written again.

    Attributes:
        earlier: the rows of this seed that the file held before.
        kept: the earlier rows up to `resume_step`; later rows are dropped from the file.
    """

    def __init__(
        self,
        path: Path,
        seed: int | None,
        resume_step: int | None = None,
        known: Sequence[Row] = (),
    ) -> None:
        self.path = path
        self.seed = "" if seed is None else str(seed)
        last = -1 if resume_step is None else resume_step
        self.earlier: list[Row] = []
        with locked(path.parent):
            rows = self._read()
            for row in rows:
                if row["seed"] == self.seed:
                    cells = {k: float(v) for k, v in row.items() if v and k not in ("seed", "step")}
                    self.earlier.append((int(row["step"]), cells))
            self.kept = [row for row in self.earlier if row[0] <= last]
            kept = [row for row in rows if row["seed"] != self.seed or int(row["step"]) <= last]
            # a killed process or a full disk may have lost rows that a checkpoint still has
            filled = [_without_gaps(row) for row in kept]
            if any(self._row(*row) not in filled for row in known):
                say(f"{path}: rows are missing or damaged; those of seed {seed} are written again")
                self.earlier = [*known, *(row for row in self.earlier if row[0] > last)]
                self.kept = list(known)
                kept = [row for row in kept if row["seed"] != self.seed]
                kept += [self._row(*row) for row in known]
            if path.exists() or kept:
                self._write(kept)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add one row to the file."""
        row = self._row(step, values)
        with locked(self.path.parent):
            columns = self._columns()
            if set(row) <= set(columns):
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    if not self.path.read_bytes().endswith(b"\n"):
                        file.write("\n")  # after the half line of a process that was killed
                    csv.DictWriter(file, columns, restval="", lineterminator="\n").writerow(row)
                sync(self.path)
            else:
                self._write([*self._read(), row])

    def _row(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """Return a row as it is written; `repr` keeps every bit of a number."""
        return {
            "seed": self.seed,
            "step": str(step),
            **{name: repr(value) for name, value in values.items()},
        }

    def _lines(self) -> Iterator[list[str]]:
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                yield from csv.reader(file)

    def _columns(self) -> list[str]:
        columns = next(self._lines(), [])
        if columns[:2] == ["seed", "step"]:
            return columns
        return []  # the header is damaged

    def _read(self) -> list[dict[str, str]]:
        header = self._columns()
        # a process that was killed may have left half a line, and a power cut zeros
        lines = [line for line in self._lines() if len(line) == len(header) and _are_numbers(line)]
        return [dict(zip(header, line, strict=True)) for line in lines]

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = dict.fromkeys(["seed", "step"])  # in the order of the names
        for row in rows:
            columns |= dict.fromkeys(row)
        with (
            written_whole(self.path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _without_gaps(row: Mapping[str, str]) -> dict[str, str]:
    """Return a row of the file without columns that it has no value of."""
    return {name: value for name, value in row.items() if value or name == "seed"}


def _are_numbers(line: list[str]) -> bool:
    """Return True for a line with a step, and with numbers or nothing in the other columns."""
    try:
        return int(line[1]) >= 0 and len([float(value or 0) for value in line]) > 1
    except (IndexError, ValueError):
        return False
