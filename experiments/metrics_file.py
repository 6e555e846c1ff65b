"""metrics.csv: every number of a run, readable without any tool."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from knobwise.envs.files import written_whole


class MetricsFile:
    """`metrics.csv`: one row per seed and call, columns seed, step and every name logged so far.

    A new name widens the file (it is rewritten whole). Rows are on disk when `append` returns.
    """

    def __init__(self, path: Path, seed: int | None, resume_step: int | None = None) -> None:
        self.path, self.seed = path, "" if seed is None else str(seed)
        self.columns = ["seed", "step"]
        if path.exists():
            self.columns, rows = self._read()
            last = -1 if resume_step is None else resume_step
            self._write([row for row in rows if row["seed"] != self.seed or int(row["step"]) <= last])

    def append(self, step: int, values: Mapping[str, float]) -> None:
        row = {"seed": self.seed, "step": str(step), **{name: repr(value) for name, value in values.items()}}
        new = [name for name in row if name not in self.columns]
        if new or not self.path.exists():
            rows = self._read()[1] if self.path.exists() else []
            self.columns = [*self.columns, *new]
            self._write([*rows, row])
        else:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns, restval="", lineterminator="\n").writerow(row)

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            header, *lines = list(csv.reader(file)) or [["seed", "step"]]
        # a process that was killed may have left half a line
        return header, [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]

    def _write(self, rows: list[dict[str, str]]) -> None:
        with written_whole(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
