"""metrics.csv: every number of a run, readable without any tool."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

from knobwise.common.files import locked, written_whole


class MetricsFile:
    """`metrics.csv`: one row per seed and call, columns seed, step and every name logged so far.

    A new name widens the file (it is rewritten whole). Rows are on disk when `append` returns. Several processes, each
    with its own seed, may write to one file.

    Attributes:
        earlier: the rows of this seed that the file held before, as step and values.
        kept: those of them up to `resume_step`; the later ones are dropped from the file.
    """

    def __init__(self, path: Path, seed: int | None, resume_step: int | None = None) -> None:
        self.path, self.seed = path, "" if seed is None else str(seed)
        last = -1 if resume_step is None else resume_step
        self.earlier: list[tuple[int, dict[str, float]]] = []
        with locked(path.parent):
            if path.exists():
                rows = self._read()
                for row in (row for row in rows if row["seed"] == self.seed):
                    values = {k: float(v) for k, v in row.items() if v and k not in ("seed", "step")}
                    self.earlier.append((int(row["step"]), values))
                self._write([row for row in rows if row["seed"] != self.seed or int(row["step"]) <= last])
        self.kept = [row for row in self.earlier if row[0] <= last]

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row."""
        row = {"seed": self.seed, "step": str(step), **{name: repr(value) for name, value in values.items()}}
        with locked(self.path.parent):
            columns = self._columns()
            if set(row) <= set(columns):
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    if not self.path.read_bytes().endswith(b"\n"):
                        file.write("\n")  # after the half line of a process that was killed
                    csv.DictWriter(file, columns, restval="", lineterminator="\n").writerow(row)
            else:
                self._write([*self._read(), row])

    def _lines(self) -> Iterator[list[str]]:
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                yield from csv.reader(file)

    def _columns(self) -> list[str]:
        return next(self._lines(), [])

    def _read(self) -> list[dict[str, str]]:
        header, *lines = list(self._lines()) or [[]]
        # a process that was killed may have left half a line
        return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]

    def _write(self, rows: list[dict[str, str]]) -> None:
        columns = list(dict.fromkeys(["seed", "step", *self._columns(), *(name for row in rows for name in row)]))
        with written_whole(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
