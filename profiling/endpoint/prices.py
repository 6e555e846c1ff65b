"""What requests cost in US dollars, and how much may be spent."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from knobwise.common.errors import InputError, naming

MILLION = 1_000_000
IMAGE_TOKENS = 3_000
"""What an image is reserved for, where the prices do not say otherwise."""


class Price(NamedTuple):
    """The price of a model."""

    input: float
    """US dollars for a million tokens that it reads."""
    output: float
    """US dollars for a million tokens that it writes, those of thinking included."""
    cached_input: float | None = None
    """The same for tokens that the server had in its cache; None for the price of others."""
    image_tokens: int = IMAGE_TOKENS
    """The most tokens that an image counts as."""

    def usd(self, tokens_in: float, tokens_out: float, cached: float = 0) -> float:
        """Return the price of a request; `cached` of the tokens it reads were in the cache."""
        of_cached = self.input if self.cached_input is None else self.cached_input
        dollars = (tokens_in - cached) * self.input + cached * of_cached + tokens_out * self.output
        return dollars / MILLION


def read_prices(path: str | Path) -> dict[str, Price]:
    """Read a YAML file of prices by model.

    Raises:
        InputError: no such file, another form, or a price that is no number (named).
    """
    with naming(path):
        try:
            content = yaml.safe_load(Path(path).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(f"cannot be read ({error})") from error
        if not isinstance(content, dict) or not content:
            raise InputError("must hold models and prices, as {small: {input: 0.1, output: 0.4}}")
        return {str(model): _price(str(model), values) for model, values in content.items()}


def _price(model: str, values: object) -> Price:
    """Read the price of a model."""
    if not isinstance(values, Mapping) or not {"input", "output"} <= {*values}:
        raise InputError(f"{model}: needs input and output, dollars for a million tokens")
    if unknown := {*values}.difference(Price._fields):
        raise InputError(f"{model}: {unknown.pop()} is none of {', '.join(Price._fields)}")
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise InputError(f"{model}: {name}={value} must be a number from 0 on")
    return Price(**values)


class Money:
    """What was spent and what is reserved, in US dollars; for several threads.

    Args:
        limit: the most that may be spent.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.spent = 0.0
        self._reserved: list[float] = []
        self._changed = threading.Condition()

    def reserve(self, usd: float) -> bool:
        """Put so much aside if, were all of it spent, the limit would hold.

        Otherwise wait for what else is reserved, which may cost less in the end; return False if
        there is nothing to wait for.
        """
        with self._changed:
            while self.spent + sum(self._reserved) + usd > self.limit:
                if not self._reserved:
                    return False
                # now and then, so that Ctrl-C arrives
                self._changed.wait(0.2)
            self._reserved.append(usd)
            return True

    def pay(self, usd: float) -> None:
        """Spend, which was reserved or not."""
        with self._changed:
            self.spent += usd
            self._changed.notify_all()

    def free(self, reserved: float) -> None:
        """Give back what was put aside, if it was."""
        with self._changed:
            if reserved in self._reserved:
                self._reserved.remove(reserved)
            self._changed.notify_all()

    def __str__(self) -> str:
        limit = "" if self.limit == math.inf else f" of ${self.limit:g}"
        return f"${self.spent:.4g}{limit} spent"
