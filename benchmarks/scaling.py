"""What a context costs as the table grows from 10³ to 10⁷ samples, and how much memory it takes.

The table (simulated: 4 configurations, no features) is written by `ProfileTable.save` and mapped back by
`ProfileTable.load`, so that its pages are the file's and not the process's own. Prints for each size how long loading
takes, ns of CPU time for each context drawn, decided on and rewarded (batches of 16,384, one thread), the growth of
the process's own memory (RssAnon) while it loads and while it draws, and of its peak with the file's pages. What grows
at loading are the sample ids, which are Python strings. The last line is the ratio of the
largest to the smallest table.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from timing import in_a_new_process, memory, random_table

from knobwise.envs import ConfigBandit
from knobwise.envs.tables.profile_table import Knob, ProfileTable

SIZES, BATCH, CALLS = (10**3, 10**4, 10**5, 10**6, 10**7), 16_384, 60


def measure(path: Path) -> tuple[float, ...]:
    """Seconds of loading, ns a context, MiB of memory: at loading, while drawing, at the peak."""
    before, peak_before = memory("RssAnon"), memory("VmHWM")
    start = time.process_time()
    table = ProfileTable.load(path)
    env = ConfigBandit(table, batch_size=BATCH, lean=True)
    loading, loaded = time.process_time() - start, memory("RssAnon")
    actions = torch.zeros(BATCH, 1, 1, dtype=torch.int64)
    spent = []
    context = env.reset()
    for _ in range(CALLS):
        start = time.process_time()
        _, context = env.step_and_maybe_reset(context.set("action", actions))
        spent.append(time.process_time() - start)
    per_context = float(torch.tensor(spent[CALLS // 3 :]).median()) / BATCH * 1e9
    drawing, peak = memory("RssAnon") - loaded, memory("VmHWM") - peak_before
    return loading, per_context, loaded - before, drawing, peak


if __name__ == "__main__":
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            file = Path(folder) / "table.safetensors"
            random_table("simulated", (Knob("size", (1, 2, 3, 4)),), size).save(file)
            # nothing of the writing is counted
            loading, cost, at_load, drawing, peak = in_a_new_process(measure, file)
            costs.append(cost)
            print(
                f"{size:>10,} samples ({file.stat().st_size / 2**20:,.1f} MiB): loaded in {loading:.2f} s, own memory "
                f"+{at_load:.0f} MiB; {cost:.0f} ns a context, own memory +{drawing:.1f} MiB; peak +{peak:.0f} MiB",
                flush=True,
            )
    print(f"ratio {SIZES[-1]:,} / {SIZES[0]:,} samples: {costs[-1] / costs[0]:.2f}")
