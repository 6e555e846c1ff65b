"""The journal of a run: CSV files of what was logged, readable without any tool.

`metrics.csv` has every number except the speed, `histograms.csv` the histograms; equal runs leave
equal files. `speed.csv` has the speed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from knobwise.common.files import lock_folder, sync, written_whole

Row = tuple[int, dict[str, float]]
"""A step, and the numbers that were logged of it, by name."""


def place(step: int, names: Iterable[str]) -> int:
    """Return the place of a row among all of its training: each step has a validation, and after it
    an iteration."""
    return 2 * step + ends_step(names)


def ends_step(names: Iterable[str]) -> bool:
    """Return True for the names of an iteration, which is the last of its step."""
    return any(name.startswith("Train/") for name in names)


class MetricsFile:
    """One row per seed and call, with the columns seed, step and every name logged so far.

    A new name widens the file (it is rewritten whole). Rows are on disk when `append` returns.
    Several processes, each with its own seed, may write to one file.

    Args:
        seed: the seed whose rows are written and read; None for rows of all seeds together.
        stage: the stage of a selector that they are of, which is part of the names in the file.
    """

    def __init__(self, path: Path, seed: int | None, stage: str = "") -> None:
        self.path = path
        self.seed = "" if seed is None else str(seed)
        # Train/Loss of stage sft is Train/sft/Loss
        self.middle = f"/{stage}/" if stage else "/"

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to the file; a new name rewrites the whole file."""
        row = {"seed": self.seed, "step": str(step)}
        for name, value in values.items():
            # `repr` keeps every bit of a number
            row[name.replace("/", self.middle, 1)] = repr(value)
        with lock_folder(self.path.parent):
            columns = self._columns()
            if set(row) <= set(columns):
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    if not self.path.read_bytes().endswith(b"\n"):
                        file.write("\n")  # after the half line of a process that was killed
                    csv.DictWriter(file, columns, lineterminator="\n").writerow(row)
                sync(self.path)
            else:
                self._write([*self._read(), row])

    def rows(self) -> list[Row]:
        """Return the rows of this seed and stage, without the stage in the names."""
        rows = []
        for row in filter(self._is_mine, self._read()):
            step = int(row.pop("step"))
            row.pop("seed")
            values = {name.replace(self.middle, "/", 1): float(row[name]) for name in row}
            rows.append((step, values))
        return rows

    def cut(self, end: int) -> int:
        """Remove the rows of this seed and stage from a place on, and what is damaged.

        Returns:
            How many of its rows are left.
        """
        with lock_folder(self.path.parent):
            if not self.path.exists():
                return 0
            rows = []
            left = 0
            for row in self._read():
                mine = self._is_mine(row)
                if not mine or place(int(row["step"]), row) < end:
                    rows.append(row)
                    left += mine
            # a stage that was begun again may have been written after the one that follows it
            of_seed = [row for row in rows if row["seed"] == self.seed]
            in_order = iter(sorted(of_seed, key=lambda row: int(row["step"])))
            self._write([next(in_order) if row["seed"] == self.seed else row for row in rows])
            return left

    def _is_mine(self, row: Mapping[str, str]) -> bool:
        """Return True for a row of this seed and stage."""
        return row["seed"] == self.seed and any(self.middle in name for name in row)

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


def _are_numbers(line: list[str]) -> bool:
    """Return True for a line with a step, and with numbers or nothing in the other columns."""
    try:
        for value in line:
            float(value or 0)
    except ValueError:
        return False
    return line[1].isdecimal()
