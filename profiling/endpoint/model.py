"""Models behind an endpoint as an `AdaptiveVLM`, whose knobs are fields of a request."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import polars as pl
from openai.resources.chat.completions import AsyncCompletions

from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.client import EndpointClient, EndpointReply
from knobwise.profiling.endpoint.messages import (
    images_in,
    message_function,
    most_tokens,
    prompt_features,
    with_image,
)
from knobwise.profiling.endpoint.prices import Money, Price, read_prices
from knobwise.profiling.endpoint.settings import NAME, EndpointOptions
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    Configuration,
    FirstStage,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)

OURS = {
    *("self", "messages", "stream", "stream_options", "n", "timeout", "tools", "functions"),
    *("extra_headers", "extra_query", "extra_body"),
}
"""Arguments of the client that are no knobs."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Fields that bound an answer."""


@functools.cache
def request_fields() -> frozenset[str]:
    """Return the fields of a request that a knob may set."""
    return frozenset(inspect.signature(AsyncCompletions.create).parameters) - OURS


class EndpointModel:
    """Models behind an endpoint, see `AdaptiveVLM`. Close it at the end.

    Args:
        options: how it is asked.
        values: of each knob, by name; `model` is one of them.
        max_tokens: the length of an answer where no knob says it.

    Raises:
        InputError: a knob that sets nothing, no `model`, prices that lack a model, an address that
            nothing answers at; see also `read_prices`.
    """

    name = NAME
    repeats = 1
    limit = ""
    """The setting that ended the measuring."""

    def __init__(
        self, options: EndpointOptions, values: Mapping[str, Sequence[Any]], max_tokens: int
    ) -> None:
        self.extra_body = dict(options.extra_body or {})
        self._max_tokens = max_tokens
        self._options = options
        self._messages = message_function(options.messages)
        self.knobs = tuple(self._knob(name, values) for name, values in values.items())
        if "model" not in values:
            raise InputError(
                "knobs.values: must name the model or models, such as {model: [small, large]}"
            )
        # everything that can be refused without the server comes first
        self.money = Money(options.max_usd or math.inf)
        self._prices: dict[str, Price] = {}
        if options.prices is not None:
            self._prices = read_prices(options.prices)
            if unpriced := [name for name in values["model"] if name not in self._prices]:
                raise InputError(f"{options.prices}: has no price of {unpriced[0]}")
        self.measured = dict(values)
        self.concurrency = options.concurrency
        self.columns: tuple[str, ...] = ("prompt", "tokens_in", "tokens_out")
        if self._prices:
            self.columns += ("usd",)
        self._client = EndpointClient(options.endpoint, options.timeout_s)
        try:
            self._client.check(options.concurrency)
        except InputError:
            self.close()
            raise

    def _knob(self, name: str, values: Sequence[Any]) -> KnobSupport:
        """Describe a knob. Raises InputError if it sets nothing."""
        if name in self.extra_body or name in request_fields():
            sets = f"the field {name} of a request"
        elif self._options.messages is not None and name not in OURS:
            sets = "the messages of a request"
        else:
            raise InputError(
                f"knobs.values.{name}: is no field of a request; give messages=module:function, "
                "which makes the messages for a question and the knobs, or name a field of your "
                f"server's in extra_body={{{name}: …}}"
            )
        if any(value is None for value in values):
            raise InputError(f"knobs.values.{name}: null is no value; leave it out")
        return KnobSupport(name, values[0], values=tuple(values), sets=sets)

    @property
    def identity(self) -> dict[str, Any]:
        """What times and answers depend on besides the models: a profile goes on only with the
        same."""
        options = self._options
        return {
            "knobs": sorted(knob.name for knob in self.knobs),
            "endpoint": self._client.url,
            "concurrency": self.concurrency,
            "timeout_s": options.timeout_s,
            "messages": options.messages,
            "extra_body": self.extra_body,
        }

    @property
    def progress(self) -> str:
        """What was spent, for people; "" without prices."""
        return str(self.money) if self._prices else ""

    def set_knobs(self, configuration: Configuration) -> AbstractContextManager[None]:
        """Do nothing but check the values: every request brings its own. Raises InputError for a
        value that cannot be set."""
        check_configuration(self.knobs, configuration)
        return nullcontext()

    def first_stage(self, request: Request, features: bool = True) -> FirstStage:
        """Compute the features of the text, see `prompt_features`; the server is not asked."""
        start = clock_ms(on_cpu=False)
        blocks = {}
        if features:
            blocks = prompt_features(request.question, int(request.image is not None))
        spent_ms = clock_ms(on_cpu=False) - start
        texts = {"prompt": request.question}
        return FirstStage(request, blocks, None, spent_ms, spent_ms, texts=texts)

    def body(self, request: Request, configuration: Configuration) -> dict[str, Any]:
        """Return what is sent, as arguments of the client's `chat.completions.create`."""
        knobs = check_configuration(self.knobs, configuration)
        extra = dict(self.extra_body)
        fields: dict[str, Any] = {}
        for name, value in knobs.items():
            if name in extra:
                extra[name] = value
            elif name in request_fields():
                fields[name] = value
        if not {*fields, *extra}.intersection(LIMITS):
            fields["max_tokens"] = self._max_tokens
        fields["messages"] = with_image(self._messages(request.question, knobs), request.image)
        if extra:
            fields["extra_body"] = extra
        return fields

    def most_usd(self, body: Mapping[str, Any]) -> float:
        """Return the most that a request can cost in US dollars; 0 without prices."""
        if not self._prices:
            return 0.0
        price = self._prices[body["model"]]
        # the lowest of several limits holds
        fields = {**body, **body.get("extra_body", {})}
        tokens_out = min(fields[name] for name in LIMITS if name in fields)
        images = images_in(body["messages"]) * price.image_tokens
        return price.usd(most_tokens(body["messages"]) + images, tokens_out)

    def affords(self, request: Request, configuration: Configuration) -> bool:
        """Reserve what `answer` can cost at most; False if that is too much."""
        enough = self.money.reserve(self.most_usd(self.body(request, configuration)))
        if not enough:
            self.limit = f"max_usd={self.money.limit:g}"
        return enough

    def continues(self, log: pl.DataFrame) -> None:
        """Count what was spent on the measurements of a log, in earlier calls too."""
        if "extra.usd" in log.columns:
            self.money.spent = max(self.money.spent, float(log["extra.usd"].sum()))

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Ask for the answers, one after the other; several threads may ask at once.

        Raises:
            InputError: the server refuses a request as wrong, or keeps failing.
        """
        return [self._answer(self.body(stage.request, configuration)) for stage in stages]

    def _answer(self, body: dict[str, Any]) -> Answer:
        """Ask for one answer, and pay for it."""
        most = self.most_usd(body)

        def lost() -> None:
            self.money.pay(most)
            if self.money.spent + most > self.money.limit:
                raise InputError(f"max_usd={self.money.limit:g}: is spent on answers that broke")

        try:
            reply = self._client.ask(body, lost)
            usd = self._usd(reply, body, most)
            self.money.pay(usd)
        finally:
            self.money.free(most)
        extra = {"tokens_in": float(reply.tokens_in), "tokens_out": float(reply.tokens_out)}
        extra |= {"failed": float(bool(reply.failed)), "attempts": float(reply.attempts)}
        if self._prices:
            extra["usd"] = usd
        times = (reply.total_ms, reply.first_ms, 0.0)
        return Answer(reply.text, *times, 0, reply.tokens_in, reply.tokens_out, extra)

    def _usd(self, reply: EndpointReply, body: Mapping[str, Any], most: float) -> float:
        """Return the price of an answer; of one that was given up, the most that it can be."""
        if not self._prices:
            return 0.0
        if reply.counted:
            price = self._prices[body["model"]]
            return price.usd(reply.tokens_in, reply.tokens_out, reply.cached)
        if reply.failed:
            return most
        raise InputError(
            "prices: the server does not count the tokens of streamed answers; leave out prices"
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
