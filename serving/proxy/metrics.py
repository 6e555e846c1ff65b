"""What is counted, for Prometheus: over all worker processes, those that died included."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knobwise.serving.proxy.promises import CAUSES, WINDOW, PromiseWindow

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds of the times of answers."""
OWN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.03, 0.1, 1)
"""Bounds of the time that this server adds."""

EMPTY = bytes(8)
"""The beginning of a file of the library that counts nothing."""


class ServerMetrics:
    """Counters and histograms, each process its own, which are read together.

    Made once, before processes are forked.

    Args:
        folder: where processes keep them, for as long as the server runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # read by the library when it opens a file
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
        import prometheus_client as library
        from prometheus_client import values
        from prometheus_client.multiprocess import MultiProcessCollector

        # it may have been imported before the folder was known
        values.ValueClass = values.MultiProcessValue()
        registry = library.CollectorRegistry()

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return library.Counter(f"knobwise_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            full = f"knobwise_{name}_seconds"
            return library.Histogram(full, meaning, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests by how they ended", "outcome")
        self.passed = counter("passed", "Requests to other routes", "route", "status")
        self.choices = counter("choices", "Answered requests by configuration", "knobs")
        self.fallbacks = counter("fallbacks", "Decisions without features, and why", "reason")
        self.explored = counter("explored", "Requests whose configuration was drawn at random")
        self.late = counter("late", "Answered requests that missed their deadline or budget")
        self.over_limit = counter("over_limit", "Answers that cost more than a limit on usd")
        self.usd = counter("usd", "What answers cost in US dollars, with prices=…")
        self.unpriced = counter("unpriced", "Answers whose cost nobody knows, with prices=…")
        self.promised = counter("promised", "Answered requests of a controller with a promise, by "
                                "whether they had one", "promised")  # fmt: skip
        self.retries = counter("retries", "Further settings that were tried after a fault")
        self.broken = counter("broken", "Requests under way in processes that were killed")
        self.crowded = counter("crowded", "Requests that came while more were under way than when "
                               "the profile was measured")  # fmt: skip
        self.lost = counter("lost_rows", "Rows that could not be written into the log")
        self.lost_labels = counter("lost_labels", "Labels that could not be written into the log")
        self.answer = histogram("answer", "From the arrival of a request to its last byte")
        self.first = histogram("first_chunk", "From the arrival of a request to the first chunk")
        self.overhead = histogram("overhead", "From the arrival of a request until it is sent on",
                             OWN_SECONDS)  # fmt: skip
        self.level = library.Gauge(
            "knobwise_latency_level",
            "Latencies here by those in the profile, as the tracker follows them",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._share = library.Gauge(
            "knobwise_promise_on_time",
            f"Share on time of the last {WINDOW} promised answers of a process, by the trained "
            "budget that was asked for",
            ["budget"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._broken = library.Gauge(
            "knobwise_promise_broken",
            "1 while that share is below the promise by more than chance and the newest answers "
            "show nothing better, by budget and cause",
            ["budget", "cause"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._windows: dict[str, PromiseWindow] = {}
        self._promised: dict[str, float] = {}
        # what is read is the sum over processes, not the counts of this one
        self._generate: Callable[[CollectorRegistry], bytes] = library.generate_latest
        self._registry = library.CollectorRegistry()
        MultiProcessCollector(self._registry, str(folder))

    def watch_promise(self, budget: str, promise: float, met: bool, slower: float) -> None:
        """Count an answer whose time was promised, and say whether the promise is kept.

        Args:
            budget: the trained one that was asked for.
            promise: the share that is to be on time.
            met: whether the answer was.
            slower: see `PromiseWindow.cause`.
        """
        self._windows.setdefault(budget, PromiseWindow()).add(met)
        self._promised[budget] = promise
        self._show_promise(budget, slower)

    def _show_promise(self, budget: str, slower: float) -> None:
        """Set what /metrics says of a promise."""
        window = self._windows[budget]
        self._share.labels(budget).set(window.share)
        cause = window.cause(self._promised[budget], slower)
        for name in CAUSES:
            self._broken.labels(budget, name).set(float(cause == name))

    def promised_of(self) -> tuple[int, int]:
        """Return of how many answered requests a share on time was promised, and how many there
        were, over all processes."""
        text = self.text().decode()
        pairs = re.findall(
            r'^knobwise_promised_total\{promised="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
        counts = {word: round(float(count)) for word, count in pairs}
        return counts.get("yes", 0), sum(counts.values())

    def promises(self) -> dict[str, dict[str, Any]]:
        """Return how each promise was kept in this process, in plain values, by budget."""
        kept = {}
        for budget, window in self._windows.items():
            kept[budget] = {"promise": self._promised[budget], "met": window.met}
        return kept

    def take_promises(self, promises: Mapping[str, Mapping[str, Any]], slower: float) -> None:
        """Go on with what `promises` returned in another process. Raises KeyError, TypeError or
        ValueError for anything else, and changes nothing then."""
        windows = {name: PromiseWindow(map(bool, kept["met"])) for name, kept in promises.items()}
        promised = {name: float(kept["promise"]) for name, kept in promises.items()}
        self._windows, self._promised = windows, promised
        for budget in windows:
            self._show_promise(budget, slower)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        try:
            return self._generate(self._registry)
        except struct.error:
            # of a process that was killed, or has only come so far, before its file had a size;
            # what is appended is safe beside a process that goes on
            for path in self._folder.glob("*.db"):
                if not path.stat().st_size:
                    with path.open("ab") as file:
                        file.write(EMPTY)
            return self._generate(self._registry)


def label_of(knobs: Mapping[str, object]) -> str:
    """Return a configuration in plain ASCII, for a label or a header."""
    return json.dumps(knobs, separators=(",", ":"))
