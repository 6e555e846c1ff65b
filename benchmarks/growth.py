"""Time and memory of each step on tables of 10⁴ to 10⁷ cells, and logs of as many requests.

Each step is a command of knobwise in a process of its own, whose CPU seconds, seconds and most
memory the system counts. Tables are drawn from a seed, with four numbers as features. `decide` and
`update` have as many requests as the other steps have cells. Prints a table, and the exponents with
which CPU time grows: the slope of log time over log size, of the two largest sizes with 100
configurations. Draws docs/growth.svg.

    python benchmarks/growth.py [FOLDER] [--steps read,inspect] [--shapes 100x100,1000x100]

Files stay in FOLDER, if one is given, and are not made again; so do results, in growth.json. The
whole takes an hour of CPU time and 8 GB of disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# this process imports no library before it draws: a child begins with its parent's memory
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS"):
    os.environ[name] = "1"

STEPS = ("read", "inspect", "train", "decide", "update")
SHAPES = "100x100,1000x100,10000x100,100000x100,1000000x20"
"""Samples × configurations."""
CONFIGURATIONS = 100
OF_REQUESTS = ("decide", "update")
"""Steps whose size is a number of requests."""
FEATURES = ("length", "contrast", "objects", "noise")
SERVED = 10_000
"""Requests that a controller answers; longer logs repeat them under other ids."""
LABELLED = 4
"""One request in so many has a label."""
DRAWN = Path(__file__).resolve().parents[1] / "docs/growth.svg"
READING = """
import sys
import knobwise
print(knobwise.read(sys.argv[1], features="auto"))
"""


def main() -> None:
    """Run the steps at each size."""
    parser = argparse.ArgumentParser(description="Time and memory of each step, by size.")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", default=",".join(STEPS), help="none: only print and draw")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", help="not used: each step runs once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "growth.json"
        rows: list[dict[str, Any]] = []
        if kept.exists():
            rows = json.loads(kept.read_text())
        steps = [step for step in STEPS if step in options.steps.split(",")]
        for step, shape in itertools.product(steps, options.shapes.split(",")):
            samples, configurations = map(int, shape.split("x"))
            if step in OF_REQUESTS and configurations != CONFIGURATIONS:
                continue
            row = {"step": step, "samples": samples, "configurations": configurations}
            row |= measured(command_of(step, samples, configurations, folder))
            rows = [old for old in rows if not same(old, row)] + [row]
            kept.write_text(json.dumps(rows, indent=1))
            print(step, shape, row, flush=True)
    print(*lines_of(rows), sep="\n")
    draw(rows)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two rows are of the same step and size."""
    return all(first[key] == second[key] for key in ("step", "samples", "configurations"))


def cells(row: dict[str, Any]) -> int:
    """Return the number of cells, or of requests."""
    return row["samples"] * row["configurations"]


def lines_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: a row for each step, a column for each shape."""
    shapes = sorted({(cells(row), row["samples"], row["configurations"]) for row in rows})
    names = [f"{samples:,} × {configurations}" for _, samples, configurations in shapes]
    yield f"| CPU time, most memory | {' | '.join(names)} | exponent |"
    yield "|---" * (len(shapes) + 2) + "|"
    measured = {(row["step"], cells(row)): row for row in rows}
    for step in STEPS:
        values = []
        for size, _, _ in shapes:
            row = measured.get((step, size))
            values.append("")
            if row is not None:
                values[-1] = f"{row['cpu_s']:.0f} s, {row['memory_gb']:.1f} GB"
                values[-1] += " (failed)" * bool(row["status"])
        yield f"| {step} | {' | '.join(values)} | {slope(rows, step):.2f} |"


def slope(rows: list[dict[str, Any]], step: str) -> float:
    """Return the exponent of CPU time over the two largest sizes of a step."""
    of_step = [row for row in rows if row["step"] == step]
    of_step = [row for row in of_step if row["configurations"] == CONFIGURATIONS]
    if len(of_step) < 2:
        return math.nan
    small, large = sorted(of_step, key=cells)[-2:]
    return math.log(large["cpu_s"] / small["cpu_s"]) / math.log(cells(large) / cells(small))


def measured(command: list[str]) -> dict[str, float]:
    """Run a command, and return its seconds and most memory."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    # so that it is not waited for again
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "status": child.returncode,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.perf_counter() - start,
        "memory_gb": usage.ru_maxrss / 1e6,
    }


def command_of(step: str, samples: int, configurations: int, folder: Path) -> list[str]:
    """Return the command of a step, once all that it reads is there."""
    size = samples * configurations
    table = made("table", folder / f"table-{samples}x{configurations}.parquet")
    profile = ["profile=table", f"profile.path={table}", "profile.features=auto"]
    knobwise = [sys.executable, "-m", "knobwise", step]
    runs = folder / "runs"
    if step == "read":
        return [sys.executable, "-c", READING, str(table)]
    if step == "inspect":
        return [*knobwise, *profile]
    training = [*profile, "seeds=[0]", f"runs={runs}", "tracking.mode=disabled"]
    if step == "train":
        return [*knobwise, *training, f"name={samples}x{configurations}-{time.time_ns()}"]
    # a controller that any size of the others may use
    checkpoint = runs / "lean/small"
    if not checkpoint.exists():
        small = made("table", folder / "table-1000x100.parquet")
        training[1] = f"profile.path={small}"
        few = ["experiment=lean", "baselines=false", "name=small"]
        run([sys.executable, "-m", "knobwise", "train", *few, *training])
    if step == "decide":
        requests = made("requests", folder / f"requests-{size}.parquet")
        words = [f"requests={requests}", f"out={folder / 'decided.csv'}"]
        return [*knobwise, f"checkpoint={checkpoint}", *words]
    log = made("log", folder / f"log-{size}", checkpoint)
    out = folder / f"served-{time.time_ns()}"
    return [*knobwise, f"checkpoint={checkpoint}", f"log={log}", f"out={out}"]


def made(kind: str, path: Path, *others: Path) -> Path:
    """Return a path, once what belongs there is made, by a process of its own."""
    if not path.exists():
        run([sys.executable, __file__, "make", kind, str(path), *map(str, others)])
    return path


def run(command: list[str]) -> None:
    """Run a command that has to succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# -- what the steps read ---------------------------------------------------------------------------


def make_table(path: Path) -> None:
    """Write a long table, in which slower configurations are more often right on long inputs."""
    import numpy as np
    import polars as pl

    samples, configurations = map(int, path.stem.removeprefix("table-").split("x"))
    rng = np.random.default_rng(0)
    features = rng.normal(size=(samples, len(FEATURES)))
    crops = np.arange(configurations) % 10
    blocks = np.arange(configurations) // 10
    shape = (samples, configurations)
    effort = (crops + blocks) / 10
    right = features[:, :1] * effort + effort + rng.normal(size=shape) > 0.5
    seconds = (1 + 2 * effort) * np.exp(0.2 * features[:, 1:2])
    latency = 10 * seconds * (1 + 0.05 * np.abs(rng.normal(size=shape)))
    rows = {"sample_id": np.repeat(np.arange(samples), configurations)}
    rows |= {"crops": np.tile(crops, samples), "blocks": np.tile(blocks, samples)}
    rows |= {"accuracy": right.ravel().astype(np.int8), "latency_ms": latency.ravel()}
    for name, values in zip(FEATURES, features.T, strict=True):
        rows[name] = np.repeat(values, configurations)
    pl.DataFrame(rows).write_parquet(path)


def make_requests(path: Path) -> None:
    """Write requests to decide for."""
    import numpy as np
    import polars as pl

    count = int(path.stem.removeprefix("requests-"))
    rng = np.random.default_rng(1)
    rows = {"sample_id": np.arange(count), "budget_ms": rng.uniform(10, 40, count)}
    for name in FEATURES:
        rows[name] = rng.normal(size=count)
    pl.DataFrame(rows).write_parquet(path)


def make_log(path: Path, checkpoint: Path) -> None:
    """Write a log. A controller serves some requests with exploration; the others repeat them."""
    import numpy as np

    import knobwise
    from knobwise.profiling.measuring.adaptive_model import (
        Answer,
        FirstStage,
        KnobSupport,
        Request,
    )
    from knobwise.serving.adaptive_model import AdaptiveModel

    table = knobwise.read(path.parent / "table-1000x100.parquet", features="auto")
    numbers = {}
    for number in range(table.num_configurations):
        numbers[tuple(table.configuration(number).items())] = number

    class Replayed:
        """Answers in the time of the table, on a machine that is 20 % slower."""

        name = "replayed"
        knobs = tuple(KnobSupport(k.name, k.values[-1], values=k.values) for k in table.knobs)

        def first_stage(self, request: Request, features: bool = True) -> FirstStage:
            blocks = {}
            for name, block in table.features.items():
                blocks[name] = block[request.image].numpy()
            return FirstStage(request, blocks if features else {}, None, 0.0, 0.0)

        def answer(self, stages: list[FirstStage], configuration: Any) -> list[Answer]:
            (stage,) = stages
            cell = stage.request.image, numbers[tuple(configuration.items())]
            ms = 1.2 * float(table.latency_ms[cell])
            answer = Answer(
                text=str(float(table.accuracy[cell])),
                total_ms=ms,
                prefill_ms=ms,
                vision_ms=0.0,
                vision_tokens=1,
                language_tokens=1,
                output_tokens=1,
            )
            return [answer]

    count = int(path.name.removeprefix("log-"))
    part = path.with_suffix(".part")
    served = min(count, SERVED)
    rng = np.random.default_rng(2)
    policy = knobwise.load(checkpoint)
    # the tracker would follow the slower machine, and leave nothing to learn
    model = AdaptiveModel(Replayed(), policy, tracker=False, log=part, explore=0.1, seed=0)
    rows = rng.integers(table.num_samples, size=served).tolist()
    for number, row in enumerate(rows):
        result = model.answer(Request(row, ""), rng.uniform(12, 40))
        if number % LABELLED == 0:
            model.log.label(result.request_id, float(result.answer.text))
    model.log.close()
    (requests,) = part.glob("requests-*")
    process = requests.stem.rpartition("-")[2]
    files = {file: file.read_text() for file in part.iterdir()}
    for copy in range(1, count // served):
        other = f"{copy:016x}"
        for file, text in files.items():
            file.with_name(file.name.replace(process, other)).write_text(
                text.replace(process, other)
            )
    part.rename(path)


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw seconds and memory over size, both on logarithmic axes."""
    import altair as alt

    points = []
    for row in rows:
        if row["configurations"] == CONFIGURATIONS and not row["status"]:
            about = {"step": row["step"], "size": cells(row)}
            points.append({**about, "seconds": row["cpu_s"], "memory": row["memory_gb"]})
    axis = alt.Axis(values=sorted({point["size"] for point in points}), format="~s")
    x = alt.X("size:Q", title="cells, or requests", scale=alt.Scale(type="log"), axis=axis)
    base = alt.Chart(alt.InlineData(points)).mark_line(point=True)
    panels = []
    for field, title in (("seconds", "CPU seconds"), ("memory", "most memory, GB")):
        axis = alt.Axis(tickCount=4)
        y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(type="log"), axis=axis)
        colour = alt.Color("step:N", title=None, sort=list(STEPS))
        panels.append(base.encode(x=x, y=y, color=colour).properties(width=260, height=220))
    alt.hconcat(*panels).save(DRAWN)


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        MAKERS = {"table": make_table, "requests": make_requests, "log": make_log}
        MAKERS[sys.argv[2]](*map(Path, sys.argv[3:]))
    else:
        main()
