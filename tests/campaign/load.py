"""Long and large loads, by hand: `python -m tests.campaign.load threads|stream|table [n]`. Prints
what was seen.

`threads`: 8 threads share an exported controller for n decisions each (100,000). `stream`: n
requests (1,000,000) of a simulated model through `AdaptiveModel` with a tracker, exploration and a
log. `table`: a profile of n (10,000,000) samples × 27 configurations is written, mapped, split,
trained on and judged.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from knobwise.agents.controller.controller import Controller
from knobwise.agents.controller.settings import PolicyConfig
from knobwise.agents.judging.baselines import static_of
from knobwise.agents.judging.evaluation import judge
from knobwise.agents.learning.logged import read_log
from knobwise.agents.serving.adaptive_model import AdaptiveModel
from knobwise.agents.serving.request_log import RequestLog
from knobwise.agents.stack.deployed import DeployedController
from knobwise.agents.training.controller_trainer import ControllerTrainer
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.envs import builtin_profile
from knobwise.envs.configurations.budgets import default_budgets
from knobwise.envs.tables.profile_table import ProfileTable
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, Request

PART = 100_000


def memory_mb(process="self"):
    """What a process holds, without pages mapped from files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def controller_of(table):
    """A network that is not trained; it decides as fast as one that is."""
    network = Controller.for_table(table, torch.arange(1000), PolicyConfig(hidden=96))
    return DeployedController(network).eval()


def threads(count=100_000):
    table = builtin_profile()
    controller = controller_of(table).decider
    samples = [
        {name: block[row].numpy() for name, block in table.features.items()} for row in range(256)
    ]
    budgets = default_budgets(table).tolist()
    expected = [controller.decide_index(samples[k % 256], budgets[k % 5]) for k in range(1280)]
    wrong, before = [0] * 8, memory_mb()

    def decide(number):
        for k in range(count):
            if controller.decide_index(samples[k % 256], budgets[k % 5]) != expected[k % 1280]:
                wrong[number] += 1

    start, workers = (
        time.perf_counter(),
        [threading.Thread(target=decide, args=(number,)) for number in range(8)],
    )
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - start
    print(
        f"8 threads × {count:,} decisions: {sum(wrong)} wrong, {took:.0f} s, memory {before:.0f} "
        f"→ {memory_mb():.0f} MB"
    )


class SimulatedModel:
    """Answers from the profile at once; the times are those of the cells."""

    name = "simulated"

    def __init__(self, table):
        self.knobs = tuple(
            KnobSupport(knob.name, knob.values[-1], values=knob.values) for knob in table.knobs
        )
        self.columns = {
            tuple(table.configuration(c).items()): c for c in range(table.num_configurations)
        }
        self.latency_ms = table.latency_ms.tolist()
        self.blocks = [
            {n: b[row].numpy() for n, b in table.features.items()}
            for row in range(table.num_samples)
        ]

    def first_stage(self, request, features=True):
        return FirstStage(request, self.blocks[request.image] if features else {}, None, 0.0, 0.0)

    def answer(self, stages, configuration):
        column = self.columns[tuple(configuration.items())]
        times = [self.latency_ms[stage.request.image][column] for stage in stages]
        return [Answer("", ms, ms, 0.0, 1, 1, 1) for ms in times]


def stream(count=1_000_000):
    table, generator = builtin_profile(), np.random.default_rng(0)
    rows, budgets = (
        generator.integers(table.num_samples, size=count),
        default_budgets(table).tolist(),
    )
    with tempfile.TemporaryDirectory() as folder:
        log = RequestLog(folder)
        model = AdaptiveModel(
            SimulatedModel(table), controller_of(table), log=log, explore=0.05, seed=0
        )
        for first in range(0, count, PART):
            start = time.process_time()
            for k in range(first, min(first + PART, count)):
                result = model.answer(Request(int(rows[k]), ""), budgets[k % 5])
                if k % 4 == 0:
                    log.label(result.request_id, 1.0)
            micros = 1e6 * (time.process_time() - start) / min(PART, count - first)
            print(
                f"{min(first + PART, count):,}: {micros:.0f} µs a request, {memory_mb():.0f} MB",
                flush=True,
            )
        log.close()
        ids, size = set(), 0
        for path in sorted(Path(folder).glob("requests-*.jsonl")):
            size += path.stat().st_size
            with path.open() as file:
                ids |= {line.split('"id":"')[1].split('"')[0] for line in file}
        print(f"{len(ids):,} distinct rows of {count:,}, {log.lost} lost, {size / 1e9:.1f} GB")
        few = Path(folder) / "few"
        few.mkdir()
        for path in sorted(Path(folder).glob("*-00000[01].jsonl")):
            (few / path.name).symlink_to(path)
        read = read_log(few)
        print(f"of the first files {len(read.rows):,} rows read, set aside: {dict(read.aside)}")


def table(count=10_000_000):
    """The measurements repeat those of the built-in profile with noise, so that only their number
    is large."""
    small = builtin_profile()
    columns, generator = torch.arange(0, 64, 64 / 27).long(), torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "large.safetensors", time.perf_counter()
        rows = torch.arange(count) % small.num_samples
        wide = torch.cat(list(small.features.values()), 1)[:, :16].contiguous()
        large = ProfileTable(
            name="large",
            knobs=small.knobs,
            configurations=small.configurations[columns],
            accuracy=small.accuracy[:, columns][rows],
            latency_ms=small.latency_ms[:, columns][rows]
            * (0.9 + 0.2 * torch.rand(count, 1, generator=generator)),
            mask=torch.ones(count, 27, dtype=torch.bool),
            sample_ids=tuple(map(str, range(count))),
            features={"features": wide[rows]},
        )
        large.save(path)
        print(
            f"written: {path.stat().st_size / 1e9:.1f} GB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        del large, rows
        _mapped(path)


def _mapped(path):
    """In a process of its own, so that its memory is what reading, training and judging take."""
    import subprocess

    subprocess.run([sys.executable, "-m", "tests.campaign.load", "mapped", str(path)], check=True)


def mapped(path):
    peak, done = [0.0], threading.Event()

    def follow():
        while not done.wait(0.2):
            peak[0] = max(peak[0], memory_mb())

    follower, start = threading.Thread(target=follow), time.perf_counter()
    follower.start()

    def report(what):
        print(
            f"{what}: {time.perf_counter() - start:.0f} s, peak {peak[0] / 1024:.1f} GiB",
            flush=True,
        )
        peak[0] = 0.0

    try:
        large = ProfileTable.load(path)
        report("mapped")
        split = large.split()
        report("split")
        budgets = default_budgets(large)
        report("budgets")
        optimiser = OptimiserConfig(warmup_iterations=50, iterations=20)
        policy = PolicyConfig(hidden=32)
        trainer = ControllerTrainer(
            large, split, policy=policy, optimiser=optimiser, seed=0, budgets_ms=budgets
        )
        agent = trainer.run()
        del trainer
        report("trained")
        static = static_of(large, split.train)
        for name, each in (("controller", agent), ("static", static)):
            metrics = judge(each, large, split.test, budgets).metrics()
            report(f"{name} judged on {len(split.test):,}: utility {metrics['Utility']:.3f}")
    finally:
        done.set()
        follower.join()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "mapped":
        mapped(rest[0])
    else:
        {"threads": threads, "stream": stream, "table": table}[kind](*map(int, rest))
