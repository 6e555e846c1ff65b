"""Long and large loads, by hand: `python -m campaign.load threads|stream|table [n]`. Prints
what was seen.

`threads`: 8 threads share an exported controller for n decisions each (100,000). `stream`: n
requests (1,000,000) of a simulated model through `AdaptiveModel` with a tracker, exploration and a
log. `table`: a profile of n (10,000,000) samples × 27 configurations is written, mapped, split,
trained on and judged.
"""

import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from helpers import arrays, table_of
from replayed import ReplayedModel, untrained

from knobwise.agents import (
    DeployedController,
    OptimiserConfig,
    PolicyConfig,
    distillation_trainer,
    evaluate_policy,
)
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.learning.logged import read_log
from knobwise.agents.learning.request_log import RequestLog
from knobwise.envs import ProfileTable, default_budgets
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.serving import AdaptiveModel
from knobwise.testbeds import builtin_profile

PART = 100_000
UNTRAINED = PolicyConfig(hidden=96)
"""A network that is not trained decides as fast as one that is."""


def memory_mb(process="self"):
    """What a process holds, without pages mapped from files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def threads(count=100_000):
    table = builtin_profile()
    controller = untrained(table, UNTRAINED).decider
    samples = [arrays(table, row) for row in range(256)]
    budgets = default_budgets(table).tolist()
    expected = [controller.decide_index(samples[k % 256], budgets[k % 5]) for k in range(1280)]
    before = memory_mb()

    def wrong(worker):
        decided = (controller.decide_index(samples[k % 256], budgets[k % 5]) for k in range(count))
        return sum(choice != expected[k % 1280] for k, choice in enumerate(decided))

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(wrong, range(8)))
    took = time.perf_counter() - start
    print(
        f"8 threads × {count:,} decisions: {total} wrong, {took:.0f} s, memory {before:.0f} "
        f"→ {memory_mb():.0f} MB"
    )


def stream(count=1_000_000):
    table = builtin_profile()
    rows = np.random.default_rng(0).integers(table.num_samples, size=count).tolist()
    budgets = default_budgets(table).tolist()
    with tempfile.TemporaryDirectory() as folder:
        log = RequestLog(folder)
        options = {"log": log, "explore": 0.05, "seed": 0}
        model = AdaptiveModel(ReplayedModel(table), untrained(table, UNTRAINED), **options)
        for first in range(0, count, PART):
            start = time.process_time()
            last = min(first + PART, count)
            for k in range(first, last):
                result = model.answer(Request(rows[k], ""), budgets[k % 5])
                if k % 4 == 0:
                    log.label(result.request_id, 1.0)
            micros = 1e6 * (time.process_time() - start) / (last - first)
            print(f"{last:,}: {micros:.0f} µs a request, {memory_mb():.0f} MB", flush=True)
        log.close()
        ids, size = set(), 0
        for path in sorted(Path(folder).glob("requests-*.jsonl")):
            size += path.stat().st_size
            with path.open() as file:
                ids |= {line.split('"id":"')[1].split('"')[0] for line in file}
        print(f"{len(ids):,} distinct rows of {count:,}, {log.lost} lost, {size / 1e9:.1f} GB")
        few = Path(folder) / "few"
        few.mkdir()
        for kind in ("requests", "labels"):
            for path in sorted(Path(folder).glob(f"{kind}-*.jsonl"))[:2]:
                (few / path.name).symlink_to(path)
        read = read_log(few)
        print(f"of the first files {len(read.rows):,} rows read, set aside: {dict(read.aside)}")


def table(count=10_000_000):
    """The measurements repeat those of the built-in profile with noise, so that only their number
    is large."""
    small = builtin_profile()
    columns, generator = torch.arange(0, 64, 64 / 27).long(), torch.Generator().manual_seed(0)
    noise = 0.9 + 0.2 * torch.rand(count, 1, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.safetensors"
        start = time.perf_counter()
        rows = torch.arange(count) % small.num_samples
        wide = torch.cat(list(small.features.values()), 1)[:, :16].contiguous()
        knobs = {"knobs": small.knobs, "configurations": small.configurations[columns]}
        cells = small.accuracy[:, columns][rows], small.latency_ms[:, columns][rows] * noise
        table_of(*cells, wide[rows], name="large", **knobs).save(path)
        seconds = time.perf_counter() - start
        print(f"written: {path.stat().st_size / 1e9:.1f} GB, {seconds:.0f} s", flush=True)
        del cells, rows
        # in a process of its own, so that its memory is what reading, training and judging take
        command = [sys.executable, "-m", "campaign.load", "mapped", str(path)]
        subprocess.run(command, check=True)


def mapped(path):
    peak, done = [0.0], threading.Event()

    def follow():
        while not done.wait(0.2):
            peak[0] = max(peak[0], memory_mb())

    follower, start = threading.Thread(target=follow), time.perf_counter()
    follower.start()

    def report(what):
        seconds = time.perf_counter() - start
        print(f"{what}: {seconds:.0f} s, peak {peak[0] / 1024:.1f} GiB", flush=True)
        peak[0] = 0.0

    try:
        large = ProfileTable.load(path)
        report("mapped")
        split = large.split()
        report("split")
        budgets = default_budgets(large)
        report("budgets")
        optimiser = OptimiserConfig(pretrain_iterations=50, iterations=20)
        options = {"policy": PolicyConfig(hidden=32), "optimiser": optimiser, "seed": 0}
        controller = distillation_trainer(large, split, budgets_ms=budgets, **options).run()
        agent = DeployedController(controller)
        report("trained")
        static = fit_static(large, split.train)
        for name, each in (("controller", agent), ("static", static)):
            metrics = evaluate_policy(each, large, split.test, budgets).metrics()
            report(f"{name} judged on {len(split.test):,}: utility {metrics['Utility']:.3f}")
    finally:
        done.set()
        follower.join()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "mapped":
        mapped(*rest)
    else:
        {"threads": threads, "stream": stream, "table": table}[kind](*map(int, rest))
