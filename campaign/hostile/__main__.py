"""`python -m campaign.hostile 60 0`: `knobwise serve` in front of a hostile endpoint for 60 seconds,
seed 0. `python -m campaign.hostile odd 20000`: as many requests with odd names, all different.

32 clients ask by /v1/chat/completions and /v1/responses, plain and streamed, take embeddings, ask
for routes that there are not, leave, and label by the request's id or by the answer's own; workers
are killed, and the controller is replaced. The endpoint answers from
`campaign.hostile.odd_answers`. At the end every answer that a client saw is in the log once, as what
it was, and the log's sum of `usd` and that of /metrics are those of what was sent.
"""

import sys
import tempfile
from pathlib import Path

from campaign.hostile.trials import load, odd


def main(*words):
    with tempfile.TemporaryDirectory() as name:
        folder, examples, kinds = Path(name), [], {}
        if words[:1] == ("odd",):
            seen, faults = odd(folder, *map(int, words[1:]))
        else:
            seen, faults, examples, kinds = load(folder, *map(int, words))
    if kinds:
        print("| answer | sent | logged as answered | failed | abandoned |\n|---|---|---|---|---|")
    for kind, (count, logged) in sorted(kinds.items()):
        ways = " | ".join(str(logged[way]) for way in ("answered", "failed", "abandoned"))
        print(f"| {kind} | {count} | {ways} |")
    for what, value in (seen | faults).items():
        print(f"{what}: {value}")
    for line in examples[:30]:
        print(line[:1500])
    print(f"{faults.total()} not as promised")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
