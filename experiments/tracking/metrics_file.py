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
        known: the rows of this seed in its checkpoints, which take the place of those in the file:
            a killed process or a full disk may have lost rows, and what came after the checkpoint
            comes again. None leaves the file's rows as they are.

    Attributes:
        kept: the rows of this seed that count.
        earlier: these, and all that the file held before.
    """

    def __init__(self, path: Path, seed: int | None, known: Sequence[Row] | None = None) -> None:
        self.path = path
        self.seed = "" if seed is None else str(seed)
        with locked(path.parent):
            rows = self._read()
            mine = [_numbers(row) for row in rows if row["seed"] == self.seed]
            self.kept = mine if known is None else list(known)
            self.earlier = [*self.kept, *mine]
            if known is not None:
                wanted = [self._row(*row) for row in known]
                if any(row not in rows for row in wanted):
                    say(f"{path}: rows of seed {seed} are missing or damaged; written again")
                rows = [row for row in rows if row["seed"] != self.seed] + wanted
            if path.exists() or rows:
                self._write(rows)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the file; a new name rewrites the whole file."""
        row = self._row(step, values)
        with locked(self.path.parent):
            columns = self._columns()
            if set(row) <= set(columns):
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    if not self.path.read_bytes().endswith(b"\n"):
                        file.write("\n")  # after the half line of a process that was killed
                    csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
                sync(self.path)
            else:
                self._write([*self._read(), row])

    def _row(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """Return a row as it is written; `repr` keeps every bit of a number."""
        cells = {name: repr(value) for name, value in values.items()}
        return {"seed": self.seed, "step": str(step), **cells}

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
        """Return the whole rows, without the columns that they have no value of."""
        header = self._columns()
        rows = []
        for line in self._lines():
            # a process that was killed may have left half a line, and a power cut zeros
            if len(line) == len(header) and _are_numbers(line):
                cells = zip(header, line, strict=True)
                rows.append({name: cell for name, cell in cells if cell or name == "seed"})
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = dict.fromkeys(["seed", "step"])  # in the order of the names
        for row in rows:
            columns |= dict.fromkeys(row)
        with (
            written_whole(self.path) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _numbers(row: Mapping[str, str]) -> Row:
    """Return the step of a row of the file, and its numbers by name."""
    step = int(row["step"])
    return step, {name: float(row[name]) for name in row if name not in ("seed", "step")}


def _are_numbers(line: list[str]) -> bool:
    """Return True for a line with a step, and with numbers or nothing in the other columns."""
    try:
        for value in line:
            float(value or 0)
    except ValueError:
        return False
    return line[1].isdecimal()
