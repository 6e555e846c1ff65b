#!/bin/bash
# One would guess: record_corrected_value of hdrhistogram adds the requests that a client left out while it
# waited for an answer, as HdrHistogram does in Java and C: none if the answer took less than two intervals,
# for the request that was due meanwhile is sent late and recorded itself. So a correction for coordinated
# omission makes times look longer, not shorter.
# It is: it adds one more, that waited for what is left over, from 1 ms on. Of a client that is to ask ten
# times a second, and whose answers take 101 to 120 ms, half of the "corrected" times are 1 to 20 ms: the median
# falls from 110 to 20 ms, and 50 % are within a deadline of 50 ms, which no answer kept.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# it imports nothing of what it asks for
"$folder/venv/bin/pip" -q install --no-deps hdrhistogram==0.10.8 2>/dev/null
cd "$folder"
cat > run.py <<'P'
import importlib.metadata
import sys

from hdrh.histogram import HdrHistogram

INTERVAL = 100
slow = [101 + i % 20 for i in range(1000)]  # each a little longer than the interval
stall = [20] * 90 + [1050]  # all are quick but one


def histogram(times):
    made = HdrHistogram(1, 60_000, 3)
    for time in times:
        made.record_value(time)
    return made


def corrected(times):
    made = HdrHistogram(1, 60_000, 3)
    for time in times:
        made.record_corrected_value(time, INTERVAL)
    return made


def as_elsewhere(times):
    """Return the times with those that are added in Java and C, which stop at the interval."""
    return [left for time in times for left in (time, *range(time - INTERVAL, INTERVAL - 1, -INTERVAL))]


print("hdrhistogram", importlib.metadata.version("hdrhistogram"))
print(f"{'times':20}{'':18}values   within 50 ms   median    90 % within")
found = {}
for name, times in {"101 to 120 ms": slow, "20 ms, and 1050 ms": stall}.items():
    rows = {
        "as measured": histogram(times),
        "corrected": corrected(times),
        "as in Java and C": histogram(as_elsewhere(times)),
    }
    for kind, of in rows.items():
        count = of.get_total_count()
        within = sum(item.count_at_value_iterated_to for item in of if item.value_iterated_to <= 50) / count
        median, most = of.get_value_at_percentile(50), of.get_value_at_percentile(90)
        found[name, kind] = count, within, median
        print(f"{name:20}{kind:18}{count:6}{within:15.1%}{median:6} ms{most:12} ms")
added = sorted({item.value_iterated_to for item in corrected([1050])})
print(f"one answer of 1050 ms is recorded as {', '.join(map(str, added))} ms")
measured, ours, usual = (found["101 to 120 ms", kind] for kind in ("as measured", "corrected", "as in Java and C"))
off = ours[0] == 2 * measured[0] and ours[1] == 0.5 and ours[2] < 25 and added[0] == 50
right = usual == measured and measured[1] == 0 and found["20 ms, and 1050 ms", "as in Java and C"][0] == 100
sys.exit(not (off and right))
P
"$folder/venv/bin/python" run.py
