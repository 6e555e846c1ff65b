"""What is held against each other at the end: what was sent, what was seen, and what knobwise says."""

import math
import re
from collections import Counter, defaultdict

from proxied import SAFE

from campaign.hostile.clients import RESPONSES, features_of
from campaign.hostile.wire import FAULT, LEFT, TEXT, UNPRICED
from campaign.server import label_of, number_of
from knobwise.agents.learning.request_log import pack_floats
from knobwise.serving.inputs import blocks_of

PRICES = {"small": (1, 4, 0.5), SAFE: (10, 40, 10)}
"""By model: US dollars for a million tokens that are read, are written, and are cached."""
USUAL = re.compile(r"^(http://|requests must bring|tracker: |watch: |policy: |more requests are)")
"""Lines that the server may say."""


def usd_of(sent):
    """What an answer cost; None if that is not known."""
    if not isinstance(sent.tokens, tuple):
        return None
    read, wrote, cached = sent.tokens
    of_read, of_written, of_cached = PRICES[sent.model]
    return ((read - cached) * of_read + wrote * of_written + cached * of_cached) / 1e6


class Comparison:
    """Holds a log against what was sent and seen.

    Attributes:
        faults: with their counts.
        examples: of them.
        kinds: by kind of answer, how its requests are in the log.
    """

    def __init__(self, rows, sent, clients, controller):
        self.faults, self.examples = Counter(), []
        self.kinds = defaultdict(Counter)
        self._sent, self._clients, self._controller = sent, clients, controller
        self.by_number = defaultdict(list)
        self.expected_usd = []
        for row in rows:
            self.by_number[number_of(row["budget_ms"])].append(row)
        for number, seen in clients.seen.items():
            if seen.whole and seen.id and number not in self.by_number:
                self._note("whole answers that are not in the log", number, seen)
        for number, same in self.by_number.items():
            if len(same) > 1:
                self._note("requests that are in the log twice", number, same)
            for row in same:
                self._compare(number, row)

    def _note(self, fault, *about):
        self.faults[fault] += 1
        self.examples.append(f"{fault}: {about}")

    def last_of(self, number):
        """The last answer that was sent to a request; None where there was none."""
        every = [each for each in self._sent[number] if not without_route(each)]
        return every[-1] if every else None

    def _compare(self, number, row):
        every = [each for each in self._sent[number] if not without_route(each)]
        about = row, [(each.kind, each.tokens, each.model) for each in every]
        seen = self._clients.seen.get(number)
        if row["features"] is not None:
            blocks = blocks_of(features_of(number), self._controller)
            features = {name: pack_floats(block) for name, block in blocks.items()}
            if row["features"] != features:
                self._note("rows with features of another request", *about)
        if seen is not None and seen.id and seen.id != row["id"]:
            self._note("rows with another id than the answer", *about)
        if seen is not None and seen.id and seen.knobs not in (None, row["knobs"]):
            self._note("rows with other knobs than the answer", *about)
        if row.get("abandoned"):
            self.kinds[every[-1].kind if every else "none was sent"]["abandoned"] += 1
            if seen is not None and seen.whole:
                self._note("whole answers that are in the log as if nobody had waited", *about)
            if row["met"] or row.get("fault") or not 0 < row["answer_ms"] < math.inf:
                self._note("rows of clients that left with a fault, or without a time", *about)
            return None
        tokens, model, name = FAULT, row["knobs"]["model"], ""
        # an attempt may fail before the endpoint reads it, such as at a connection that it closes
        unread = row.get("attempts", 1) > len(every)
        if every and not (unread and row.get("fault", "").startswith("raised ")):
            tokens, model, name = every[-1].tokens, every[-1].model, every[-1].name
        if model != row["knobs"]["model"]:
            self._note("rows of another model than the answer", *about)
        failed = tokens in (FAULT, LEFT)
        if tokens == TEXT:
            # no text can be made of it, where the answer to a chat is turned
            turned = seen is not None and seen.path == RESPONSES and every[-1].path != "/responses"
            failed = bool(row.get("fault")) if seen is None else turned
            tokens = UNPRICED if failed else every[-1].counted
        kind = every[-1].kind if every else "none was sent"
        self.kinds[kind]["failed" if row.get("fault") else "answered"] += 1
        if bool(row.get("fault")) != failed:
            return self._note("answers that are in the log as what they were not", *about)
        if failed:
            if row.get("usd") is not None or row["answer_ms"] is not None or not row["failed"]:
                self._note("failed requests with a time or a price", *about)
            return None
        usd = usd_of(every[-1]._replace(tokens=tokens))
        self.expected_usd.append(usd or 0.0)
        if (row["usd"] is None) != (usd is None) or not math.isclose(row["usd"] or 0, usd or 0):
            self._note("rows with a wrong price", usd, *about)
        if not 0 < row["answer_ms"] < math.inf:
            self._note("answers without a time", *about)
        if row.get("answer", "") != name:
            self._note("answers with another id of their own", *about)
        return None


def without_route(sent):
    """Whether it only said that there is no /v1/responses."""
    return "route" in sent.kind and sent.path == "/responses"


def label_faults(labels, clients, numbers):
    """The faults of labels.

    Args:
        labels: rows of the log.
        numbers: of requests, by their ids.
    """
    faults = Counter()
    in_order = sorted(labels, key=lambda label: label["since_boot_s"])
    latest = {label["id"]: label["accuracy"] for label in in_order}
    for name, accuracy in latest.items():
        if name in numbers and accuracy != label_of(numbers[name]):
            faults["labels on another request"] += 1
    for name, accuracy in clients.labels.items():
        if latest.get(name) != accuracy:
            faults["labels that were taken and do not count"] += 1
    return faults


def counter_faults(counters, answered, failed, abandoned, missing):
    """The faults of the counters in /metrics.

    A worker that is killed may have counted what it could not log, but not more than what it broke
    off.

    Args:
        counters: by name.
        answered, failed, abandoned: rows of the log.
        missing: requests without a row.
    """
    broken = counters["broken_total"]

    def total(pattern):
        return sum(
            value
            for name, value in counters.items()
            if name.startswith("requests_total") and re.search(pattern, name)
        )

    faults = Counter()
    for what, pattern, logged in (
        ("answers", '"answered"', answered),
        ("failures", 'endpoint_error|"cut"', failed),
    ):
        wrong = not 0 <= total(pattern) - logged <= broken
        faults[f"{what} that /metrics does not count, or counts twice"] = wrong
    uncounted = abandoned - total("client_left")
    faults["clients that left by the log and not by /metrics"] = max(0, round(uncounted))
    unlogged = round(broken + total("client_left|refused|unchanged"))
    faults["requests that are neither in the log nor broken off"] = max(0, missing - unlogged)
    faults["counters that are not finite"] = sum(
        not math.isfinite(value) for name, value in counters.items() if "promise" not in name
    )
    return faults


def sum_faults(logged_usd, counted_usd, compared, missing):
    """The faults of the sums of `usd`.

    Args:
        logged_usd, counted_usd: of the log and of /metrics, which may have what was not logged.
        missing: numbers of requests without a row.
    """
    right = math.isclose(logged_usd, math.fsum(compared.expected_usd))
    last = filter(None, map(compared.last_of, missing))
    unlogged_usd = math.fsum(usd_of(sent) or 0 for sent in last)
    over = counted_usd - logged_usd
    return Counter({
        "a sum of usd in the log that is wrong": not right,
        "a sum of usd in /metrics that is wrong": not -1e-9 <= over <= unlogged_usd + 1e-9,
    })  # fmt: skip


def server_faults(errors, kills, left, torn):
    """The faults of the server itself, and strange lines that it said.

    Args:
        errors: the text of stderr.
        kills: of its workers.
        left: workers that outlive it.
        torn: lines of the log.
    """
    strange = [line for line in errors.splitlines() if not USUAL.match(line)]
    faults = Counter({
        "tracebacks": errors.count("Traceback"),
        "strange lines on stderr": len(strange),
        "workers that outlive the server": len(left),
        "torn lines beyond those of kills": max(0, torn - kills),
    })  # fmt: skip
    return faults, strange
