"""The settings of models behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from knobwise.common.checks import at_least
from knobwise.common.errors import InputError

NAME = "openai"
"""What stands for these models on the command line."""
LENGTHS = ("max_tokens", "max_completion_tokens")
"""The fields that bound an answer: two names of one limit, whose value is a cap."""


@dataclass
class EndpointOptions:
    """How models behind an endpoint are asked."""

    endpoint: str | None = None
    """With model=openai: the address of an OpenAI-compatible server, such as
    http://127.0.0.1:8000/v1. Its key is read from OPENAI_API_KEY, and never written."""
    concurrency: int = 8
    """With model=openai: how many requests are sent at once. Times hold for as many."""
    timeout_s: float = 60.0
    """With model=openai: an answer that takes longer is given up, counts as wrong, and takes
    exactly so long."""
    prices: str | None = None
    """With model=openai: a YAML file of US dollars for a million tokens by model, such as
    {small: {input: 0.1, output: 0.4}}; also by service tier, and above a length of the prompt. The
    price of a request becomes the column usd."""
    max_usd: float | None = None
    """With `prices`: no request is sent that could bring all that was paid for what is in `out`, in
    this call and before, above so many US dollars. The same command with more goes on."""
    messages: str | None = None
    """With model=openai: module:function, your own: the list of chat messages for a question and a
    dictionary of the knobs. Needed for knobs that are no fields of a request."""
    extra_body: Any = None
    """With model=openai: further fields of every request, such as {temperature: 0, top_k: 20}. A
    knob of the same name sets the field."""

    def __post_init__(self) -> None:
        at_least("concurrency", self.concurrency, 1)
        if not 0 < self.timeout_s < math.inf:
            raise InputError(f"timeout_s={self.timeout_s}: must be a positive number of seconds")
        if self.max_usd is not None:
            if not 0 < self.max_usd < math.inf:
                raise InputError(f"max_usd={self.max_usd}: must be a positive number of dollars")
            if self.prices is None:
                raise InputError(
                    f"max_usd={self.max_usd}: needs prices=FILE, dollars for a million tokens"
                )
        if not isinstance(self.extra_body or {}, dict):
            raise InputError(f"extra_body={self.extra_body}: must be like {{temperature: 0}}")


NAMES = tuple(field.name for field in fields(EndpointOptions))
"""The names of these settings."""


def endpoint_options(config: EndpointOptions) -> EndpointOptions:
    """Return these settings alone, of settings that have more."""
    return EndpointOptions(**{name: getattr(config, name) for name in NAMES})
