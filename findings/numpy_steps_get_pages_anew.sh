#!/bin/bash
# One would guess: a loop whose steps each allocate the same few MB and free those of the step before
# gets the memory that it has just freed, so that after some steps the system is not asked any more.
# It is: with glibc the free memory at the end of the heap goes back to the system in each step, where
# it is more than twice the largest block that was freed so far, and the pages of the next step are
# zeroed anew: here some 750 in each, and the step takes four times as long. One larger block, of up to
# 32 MB, that is allocated and freed once before the loop ends that: it raises the limit.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install numpy==2.4.6 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import platform
import resource
import sys
import time

import numpy as np

if sys.argv[1] == "freed":
    np.empty(24 << 20, np.uint8)
draw = np.random.default_rng(0)
images = draw.random((2000, 192), dtype=np.float32)
texts = draw.random((2000, 96), dtype=np.float32)


def observations():
    """What a batch of 4,096 samples sees before and after its decisions."""
    rows = draw.integers(2000, size=4096)
    return images[rows], texts[rows], images[rows], texts[rows]


for step in range(70):
    if step == 20:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.process_time()
    seen = observations()
faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / 50
took_ms = (time.process_time() - began) / 50 * 1e3
if sys.argv[1] == "plain":
    print("numpy", np.__version__, *platform.libc_ver())
print(f"{sys.argv[1]}: {faults:.0f} new pages and {took_ms:.1f} ms of CPU in each step")
sys.exit(not (faults > 500 if sys.argv[1] == "plain" else faults < 20))
P
"$folder/venv/bin/python" run.py plain
"$folder/venv/bin/python" run.py freed
