"""Serve in front of a hostile endpoint, and hold what is said against what was done."""

import http.client
import itertools
import json
import math
import os
import random
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from proxied import export

from campaign.hostile.clients import HostileClients, odd_request
from campaign.hostile.comparison import (
    PRICES,
    Comparison,
    counter_faults,
    label_faults,
    server_faults,
    sum_faults,
)
from campaign.hostile.endpoint import HostileEndpoint
from campaign.load import memory_mb
from campaign.server import WAIT_S, Server
from knobwise.agents import NumpyController

TIMEOUT_S = 5
QUICK = {"optimiser": {"teacher_iterations": 20, "pretrain_iterations": 20, "iterations": 1}}
"""How controllers are trained, which need not be good."""
LIKE_IT_MB = 6
"""What the memory of a worker may grow by over the requests with odd names."""


def load(folder, seconds=60, seed=0, workers=4, clients=32):
    """Serve, ask, kill and replace in a folder. Return what was seen by name, the faults, examples
    of them, and how the kinds of answers are in the log."""
    versions = prepared(folder)
    with HostileEndpoint(seed) as endpoint:
        words = f"endpoint={endpoint.url} prices=prices.yaml watch=deployed explore=0.1 timeout_s={TIMEOUT_S}"
        server = Server(folder, workers, words)
        try:
            until = time.monotonic() + seconds
            asking = HostileClients(server.port, until)
            draws = [random.Random(f"{seed} {client}") for client in range(clients)]
            with ThreadPoolExecutor(clients + 1) as pool:
                swaps = pool.submit(replace_at_random, folder / "deployed", versions, until, seed)
                ended = pool.map(asking.client, draws)
                server.kill_at_random(until, seed)
                list(ended)  # raises what a client raised
            time.sleep(1)
            counters = counters_in(text_of(server.port))
        finally:
            left = server.end()

    # what is in the log, of what was sent and seen
    rows, torn = lines_in(folder / "log", "requests")
    labels, torn_labels = lines_in(folder / "log", "labels")
    compared = Comparison(rows, endpoint.sent, asking, NumpyController.load(versions[0]))
    missing = [number for number in endpoint.sent if number not in compared.by_number]
    abandoned = sum(bool(row.get("abandoned")) for row in rows)
    failed = sum("fault" in row for row in rows)
    answered = len(rows) - failed - abandoned
    logged_usd = math.fsum(row.get("usd") or 0 for row in rows)
    numbers = {row["id"]: number for number, same in compared.by_number.items() for row in same}
    torn += torn_labels

    faults = compared.faults
    faults += label_faults(labels, asking, numbers)
    faults += sum_faults(logged_usd, counters["usd_total"], compared, missing)
    faults += counter_faults(counters, answered, failed, abandoned, len(missing))
    of_server, strange = server_faults(server.errors.read_text(), server.kills, left, torn)
    faults += of_server
    faults["answers of status 500, or without an id"] = len(asking.wrong)
    idle = not (answered and failed and asking.labels and server.kills)
    faults["nothing answered, failed, labelled or killed"] = idle

    outcomes = {
        name.split('"')[1]: value
        for name, value in counters.items()
        if name.startswith("requests_total")
    }
    seen = {
        "requests asked": next(asking.numbers) - 1,
        "rows": len(rows),
        "answered": answered,
        "failed": failed,
        "abandoned": abandoned,
        "requests without a row": len(missing),
        "broken off, by /metrics": counters["broken_total"],
        "usd in the log, expected, in /metrics": f"{logged_usd:.9f}, {math.fsum(compared.expected_usd):.9f}, {counters['usd_total']:.9f}",
        "labels taken": len(asking.labels),
        "workers killed": server.kills,
        "controllers replaced": swaps.result(),
        "torn lines": torn,
        "answers sent": endpoint.kinds.total(),
        "requests by outcome": outcomes,
        "memory of the spared worker, MB": server.memory[:: max(1, len(server.memory) // 6)],
        "how requests ended": dict(sorted(asking.ended.items(), key=str)),
    }
    examples = [*compared.examples, *asking.wrong, *strange]
    kinds = {kind: (count, compared.kinds[kind]) for kind, count in endpoint.kinds.items()}
    return seen, +faults, examples, kinds


def odd(folder, count=20_000, clients=8):
    """Send so many requests with odd names, all different, to one worker. Return what was seen by
    name, and the faults."""
    prepared(folder)
    with HostileEndpoint(harmless=1.0) as endpoint:
        words = f"endpoint={endpoint.url} prices=prices.yaml opened=[files] explore=0.1"
        server = Server(folder, 1, words)
        states, ended, numbers = [], Counter(), itertools.count(1)
        lock = threading.Lock()

        def ask(_):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
            while (number := next(numbers)) <= count:
                connection.request(*odd_request(number))
                response = connection.getresponse()
                response.read()
                with lock:
                    ended[response.status] += 1
                if response.will_close:
                    connection.close()
            connection.close()

        def state():
            # a configuration has a line from its first choice on, however late that is
            lines = text_of(server.port).splitlines()
            lines = sum(not line.startswith("knobwise_choices_total") for line in lines)
            handles = len(os.listdir(f"/proc/{server.spared}/fd"))
            return lines, handles, round(memory_mb(server.spared), 1)

        try:
            states.append((0, *state()))
            total = count
            for part in range(5):
                count = total * (part + 1) // 5
                numbers = itertools.count(total * part // 5 + 1)
                with ThreadPoolExecutor(clients) as pool:
                    list(pool.map(ask, range(clients)))
                # idle connections of clients that are gone
                time.sleep(0.5)
                states.append((count, *state()))
            chosen = text_of(server.port).count("\nknobwise_choices_total")
        finally:
            server.end()
    seen = {"requests by status": dict(ended), "configurations chosen": chosen}
    for number, lines, handles, memory in states:
        seen[f"after {number}"] = (
            f"{lines} other lines of /metrics, {handles} descriptors, {memory} MB"
        )
    configurations = len(NumpyController.load(folder / "controller.npz").configurations)
    first, last = states[1], states[-1]
    # each client may have a connection of its own to the endpoint by then, which is kept
    faults = Counter({
        "lines of /metrics that grew": max(0, last[1] - first[1]),
        "choices that are no configuration": max(0, chosen - configurations),
        "descriptors that grew": max(0, last[2] - first[2] - clients),
        "memory that grew": last[3] > first[3] + LIKE_IT_MB,
        "statuses of 500 and above": sum(times for status, times in ended.items() if status >= 500),
        "tracebacks": server.errors.read_text().count("Traceback"),
    })  # fmt: skip
    return seen, +faults


def prepared(folder):
    """Two controllers and the prices in a folder; the path of each controller."""
    versions = [folder / "first.npz", folder / "second.npz"]
    export(versions[0], **QUICK)
    export(versions[1], **QUICK, **{"policy.hidden": 12})
    (folder / "deployed").mkdir()
    for path in (folder / "controller.npz", folder / "deployed" / "controller.npz"):
        shutil.copy(versions[0], path)
    names = ("input", "output", "cached_input")
    prices = {model: dict(zip(names, price, strict=True)) for model, price in PRICES.items()}
    (folder / "prices.yaml").write_text(json.dumps(prices))
    return versions


def replace_at_random(folder, versions, until, seed):
    """Replace the controller now and then until a moment; return how often."""
    draw, swaps = random.Random(seed), 0
    while time.monotonic() < until:
        time.sleep(draw.uniform(1, 3))
        new = folder / "new.npz"
        if draw.random() < 0.2:
            new.write_bytes(b"no controller")
        else:
            shutil.copy(draw.choice(versions), new)
        os.replace(new, folder / "controller.npz")
        swaps += 1
    return swaps


def lines_in(folder, kind):
    """The rows of a log, and how many lines are torn."""
    rows, torn = [], 0
    for path in folder.glob(f"{kind}-*.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                rows.append(json.loads(line))
            else:
                torn += 1
    return rows, torn


def counters_in(text):
    """The numbers of /metrics by name, labels included."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("knobwise_"): float(value) for name, _, value in lines}


def text_of(port, path="/metrics"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("GET", path)
    content = connection.getresponse().read().decode()
    connection.close()
    return content
