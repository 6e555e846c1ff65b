#!/bin/bash
# One would guess: of a few hundred latencies in whole milliseconds, of which 92 % are 2 ms, tdigest says
# that about 92 % are within 100 ms, and that the median is 2 ms.
# It is: values that are equal become one centroid, and a centroid is taken to be spread evenly around its
# mean, up to half-way to the next one. So the share within 2.5 ms is 46 %, that within 100 ms 57 %, and
# the median 71 ms, which no answer took. The same times with fractions of a millisecond give 92 % and 2 ms.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q install tdigest==0.5.2.2 accumulation-tree==0.6.4 pyudorandom==1.0.0 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import random
import sys

from tdigest import TDigest

random.seed(0)
# of 500 answers 460 come from a cache, 40 are made
cached = [2.0] * 460
made = [float(800 + 2 * i) for i in range(40)]
whole = random.sample(cached + made, 500)
fractions = [value + random.uniform(-0.4, 0.4) for value in whole]


def asked(times):
    """Return what the digest says, and what is: shares within 2.5 and 100 ms, median and 90th percentile."""
    digest = TDigest()
    digest.batch_update(times)
    ordered = sorted(times)
    said = [digest.cdf(2.5), digest.cdf(100), digest.percentile(50), digest.percentile(90)]
    true = [sum(time <= limit for time in times) / len(times) for limit in (2.5, 100)]
    return said, true + [ordered[len(times) // 2 - 1], ordered[len(times) * 9 // 10 - 1]]


print("tdigest", importlib.metadata.version("tdigest"))
print(f"{'':34}within 2.5 ms   within 100 ms    median    90 % within")
rows = {}
for name, times in {"whole milliseconds": whole, "with fractions": fractions}.items():
    rows[name] = asked(times)
    for who, (early, late, median, most) in zip(("tdigest", "of the times"), rows[name]):
        print(f"{name + ', ' + who:34}{early:13.1%}{late:16.1%}{median:8.1f} ms{most:12.1f} ms")
said, true = rows["whole milliseconds"]
well = rows["with fractions"][0]
off = said[0] < 0.5 and said[1] < 0.6 and said[2] > 50 and said[3] > 600 and true[1] == 0.92 and true[3] == 2
sys.exit(not (off and well[1] > 0.88 and well[2] < 3 and well[3] < 5))
P
"$folder/venv/bin/python" run.py
