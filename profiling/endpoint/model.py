"""Models behind an endpoint as an `AdaptiveVLM`, whose knobs are fields of a request."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from openai.resources.chat.completions import AsyncCompletions

from knobwise.common.errors import InputError
from knobwise.common.progress import say
from knobwise.profiling.endpoint.messages import (
    message_function,
    prompt_features,
    with_image,
)
from knobwise.profiling.endpoint.model_changes import measure_changes, say_costs
from knobwise.profiling.endpoint.paid import PaidClient
from knobwise.profiling.endpoint.remarks import (
    CHANGE_MS,
    CHANGED,
    cached_prompts,
    changes,
    cut_prompts,
    ignored_knobs,
    thoughts,
    uncounted,
)
from knobwise.profiling.endpoint.settings import LENGTHS, NAME, EndpointOptions
from knobwise.profiling.measuring.adaptive_model import (
    Answer,
    Configuration,
    FirstStage,
    KnobSupport,
    Request,
    check_configuration,
    clock_ms,
)

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue
    from knobwise.profiling.endpoint.replies import Body
    from knobwise.profiling.measuring.measuring import MeasurementPlan

OURS = {
    *("self", "messages", "stream", "stream_options", "n", "timeout", "tools", "functions"),
    *("extra_headers", "extra_query", "extra_body"),
}
"""Arguments of the client that are no knobs."""


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
        names = [name for name in ("model", "service_tier") if name in values]
        grid = itertools.product(*(values[name] for name in names))
        priced = [dict(zip(names, each, strict=True)) for each in grid]
        self._client = PaidClient(options, priced)
        self.measured = dict(values)
        self.concurrency = options.concurrency
        # by model, if a change of it takes long
        self._change_ms: dict[str, float] = {}
        self._last: str | None = None
        # in earlier calls
        self._spent_before = 0.0
        self.columns: tuple[str, ...] = ("prompt", "tokens_in", "tokens_out", "tokens_cached")
        if self._client.prices:
            self.columns += ("usd",)

    def _knob(self, name: str, values: Sequence[KnobValue | None]) -> KnobSupport:
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
    def identity(self) -> dict[str, object]:
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
        return self._client.progress

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

    def body(self, request: Request, configuration: Configuration) -> Body:
        """Return what is sent, as arguments of the client's `chat.completions.create`."""
        knobs = check_configuration(self.knobs, configuration)
        extra = dict(self.extra_body)
        fields: dict[str, Any] = {}
        for name, value in knobs.items():
            if name in extra:
                extra[name] = value
            elif name in request_fields():
                fields[name] = value
        if not {*fields, *extra}.intersection(LENGTHS):
            fields["max_tokens"] = self._max_tokens
        fields["messages"] = with_image(self._messages(request.question, knobs), request.image)
        if extra:
            fields["extra_body"] = extra
        return fields

    def blocks(
        self, requests: Sequence[Request], configurations: Sequence[Configuration]
    ) -> list[list[int]]:
        """Measure what changes of the model cost, by untimed answers; a block for each model if
        they cost something, see `measure_changes`."""
        places: dict[str, list[int]] = {}
        for place, configuration in enumerate(configurations):
            places.setdefault(configuration["model"], []).append(place)

        def first_ms(model: str, turn: int) -> float | None:
            request = requests[turn % len(requests)]
            configuration = configurations[places[model][0]]
            if not self.affords(request, configuration):
                return None
            return self._client.ask(self.body(request, configuration))[0].first_ms

        if len(places) > 1:
            self._change_ms = measure_changes(first_ms, [*places])
        if not self._change_ms:
            return [[*range(len(configurations))]]
        say(
            f"{self._client.url}: after a change of the model the first token takes longer by "
            f"{say_costs(self._change_ms)}; models are measured one after the other"
        )
        return [*places.values()]

    def remarks(self, plan: MeasurementPlan, log: pl.DataFrame) -> list[str]:
        """Return what the measurements say of the server: knobs that it may ignore, what changes of
        the model cost, prompts that it had in its cache or cut, thoughts in its answers, and tokens
        that it did not count."""
        return [
            *ignored_knobs(plan, log, self.knobs),
            *changes(plan.select(log)),
            *cached_prompts(plan, log),
            *cut_prompts(plan, log),
            *thoughts(plan, log),
            *uncounted(plan, log),
        ]

    def affords(self, request: Request, configuration: Configuration) -> bool:
        """Reserve what `answer` can cost at most; False if that is too much."""
        body = self.body(request, configuration)
        enough = self._client.reserve(body)
        self.limit = "" if enough else self._why_no_more(self._client.most_usd(body))
        return enough

    def _why_no_more(self, most: float) -> str:
        """Return the limit of money, with why it allows no request that can cost so much."""
        spent = self._client.money.spent
        nothing = ", so nothing was asked" if spent == self._spent_before else ""
        return (
            f"{self._client.limit} (${spent:.4g} is spent, and the next request could cost "
            f"${most:.4g}{nothing})"
        )

    @contextmanager
    def saving_for(
        self, request: Request, configurations: Sequence[Configuration]
    ) -> Iterator[None]:
        """Afford nothing in the block that takes the money for these answers."""
        bodies = [self.body(request, each) for each in configurations]
        money = self._client.money
        money.saved = sum(map(self._client.most_usd, bodies))
        try:
            yield
        finally:
            money.saved = 0.0

    def continues(self, state: Path, log: pl.DataFrame) -> None:
        """Count what earlier calls spent, and keep what this one spends in the state folder.

        Raises InputError if they paid other prices, or if they had prices and this one has none.
        """
        usd = log["extra.usd"] if "extra.usd" in log.columns else pl.repeat(None, len(log))
        usd = pl.select(usd).to_series().cast(pl.Float64)
        priced = bool(self._client.prices)
        if (usd.is_not_null() != priced).any():
            raise InputError(
                f"{state.parent}: holds answers that were measured with"
                f"{'out' if priced else ''} prices; "
                f"{'leave out prices' if priced else 'give prices=… again'}, or choose another out "
                "folder"
            )
        self._client.keep(state, float(usd.sum()))
        self._spent_before = self._client.money.spent

    def answer(self, stages: Sequence[FirstStage], configuration: Configuration) -> list[Answer]:
        """Ask for the answers, one after the other; several threads may ask at once.

        Raises:
            InputError: the server refuses a request as wrong, or keeps failing.
        """
        return [self._answer(stage.request, configuration) for stage in stages]

    def _answer(self, request: Request, configuration: Configuration) -> Answer:
        """Ask for one answer, and pay for it."""
        start = clock_ms(on_cpu=False)
        body = self.body(request, configuration)
        changed = self._last is not None and self._last != body["model"]
        self._last = body["model"]
        reply, usd = self._client.ask(body)
        extra = {"tokens_in": float(reply.tokens_in), "tokens_out": float(reply.tokens_out)}
        if not reply.counted:
            # as of every answer that was given up
            extra = dict.fromkeys(extra, math.nan)
        # what is not known is left out of the log
        extra["tokens_cached"] = reply.tokens_cached if reply.counted else math.nan
        extra |= {"failed": float(bool(reply.failed)), "attempts": float(reply.attempts)}
        if len(self.measured["model"]) > 1:
            extra[CHANGED] = float(changed)
        if cost_ms := self._change_ms.get(body["model"]):
            extra[CHANGE_MS] = cost_ms
        if self._client.prices:
            extra["usd"] = usd
        # waits, attempts that came to nothing, and the client's own work
        beside_ms = clock_ms(on_cpu=False) - start - reply.total_ms
        return Answer(
            text=reply.text,
            total_ms=reply.total_ms,
            prefill_ms=reply.first_ms,
            vision_ms=0.0,
            vision_tokens=0,
            language_tokens=reply.tokens_in,
            output_tokens=reply.tokens_out if reply.counted else reply.chunks,
            extra=extra,
            uncounted_ms=max(0.0, beside_ms),
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
