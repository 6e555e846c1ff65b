"""What requests cost in US dollars, and how much may be spent."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from knobwise.common.errors import InputError, naming
from knobwise.profiling.endpoint.token_counts import count_tokens

MILLION = 1_000_000
IMAGE_TOKENS = 3_000
"""What an image is reserved for, where the prices do not say otherwise."""
ABOVE = "above"
"""The entry of a price with the prices of longer prompts."""
NUMBERS = ("input", "output", "cached_input")
IMAGES = "image_tokens"
STANDARD = ("auto", "default", "standard", "on_demand")
"""Names that servers give the service tier that a price without a tier is for."""


@dataclass(frozen=True)
class Price:
    """The price of a model."""

    input: float
    """US dollars for a million tokens that it reads."""
    output: float
    """US dollars for a million tokens that it writes, those of thinking included."""
    cached_input: float | None = None
    """The same for tokens that the server had in its cache; None for the price of others."""
    image_tokens: int = IMAGE_TOKENS
    """The most tokens that an image counts as."""
    above: Mapping[int, Price] = field(default_factory=dict)
    """What all tokens of a request cost if its prompt has more tokens than so many."""
    tiers: Mapping[str, Price] = field(default_factory=dict)
    """The prices of service tiers, by name, each with an `above` of its own."""

    def usd(self, tokens_in: float, tokens_out: float, cached: float = 0) -> float:
        """Return the price of a request; `cached` of the tokens it reads were in the cache."""
        if exceeded := [length for length in self.above if tokens_in > length]:
            return self.above[max(exceeded)].usd(tokens_in, tokens_out, cached)
        of_cached = self.input if self.cached_input is None else self.cached_input
        dollars = (tokens_in - cached) * self.input + cached * of_cached + tokens_out * self.output
        return dollars / MILLION

    def most_usd(self, tokens_in: float, tokens_out: float) -> float:
        """Return the most that a request with no more tokens can cost, in whatever tier."""
        dearest = max(self.input, self.cached_input or 0.0)
        most = (tokens_in * dearest + tokens_out * self.output) / MILLION
        reached = [price for length, price in self.above.items() if tokens_in > length]
        others = [
            price.most_usd(tokens_in, tokens_out) for price in (*reached, *self.tiers.values())
        ]
        return max([most, *others])

    def in_tier(self, service_tier: object) -> Price | None:
        """Return the price in the service tier that an answer names; None if that is not known."""
        tier = service_tier or STANDARD[0]
        if price := self.tiers.get(str(tier)):
            return price
        return self if tier in STANDARD else None


def answer_usd(
    price: Price | None, usage: object, service_tier: object = None, has_text: bool = True
) -> float:
    """Return what an answer cost in US dollars; NaN if that is not known. The one place where
    answers are priced, in measuring and in serving.

    Args:
        price: of the model; None if it has none.
        usage: what the server says of the tokens, see `count_tokens`; None if nothing.
        service_tier: what the answer says of it; None if nothing.
        has_text: whether the answer has any text (or calls a tool): it then took tokens, whatever
            the server says.
    """
    try:
        tokens = count_tokens(usage)
    except ValueError:
        return math.nan
    price = price.in_tier(service_tier) if price else None
    if price is None or tokens is None or (has_text and not (tokens.read and tokens.written)):
        return math.nan
    usd = price.usd(*tokens)
    return usd if usd < math.inf else math.nan


def lacking_tiers(
    prices: Mapping[str, Price], configurations: Iterable[Mapping[str, object]]
) -> str:
    """Return what is wrong if some of the fields `model` and `service_tier` of requests name a tier
    that has no price; "" if none does."""
    for fields in configurations:
        price = prices.get(str(fields.get("model")))
        tier = fields.get("service_tier")
        if price and price.in_tier(tier) is None:
            return (
                f"has no price of service_tier={tier} for {fields['model']}; give it one, such as "
                f"{fields['model']}: {{input: …, output: …, {tier}: {{input: …, output: …}}}}"
            )
    return ""


def read_prices(path: str | Path) -> dict[str, Price]:
    """Read a YAML file of prices by model.

    Raises:
        InputError: no such file, another form, or a price that is no number (named).
    """
    # what serves without prices need not wait for it
    import yaml  # type: ignore[import-untyped]

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
    plain: object = values
    tiers = {}
    if isinstance(values, Mapping):
        tiers = {name: value for name, value in values.items() if _is_tier(name, value)}
        plain = {name: value for name, value in values.items() if name not in tiers}
    return replace(
        _rates(model, plain, (*NUMBERS, IMAGES, ABOVE)),
        tiers={
            str(tier): _rates(f"{model}.{tier}", value, (*NUMBERS, ABOVE))
            for tier, value in tiers.items()
        },
    )


def _is_tier(name: object, value: object) -> bool:
    """Return True for an entry of a price that holds the prices of a service tier."""
    return isinstance(value, Mapping) and name not in (*NUMBERS, IMAGES, ABOVE)


def _rates(name: str, values: object, known: Sequence[str]) -> Price:
    """Read a price that has no tiers."""
    if not isinstance(values, Mapping) or not {"input", "output"} <= {*values}:
        raise InputError(f"{name}: needs input and output, dollars for a million tokens")
    if unknown := {*values}.difference(known):
        raise InputError(f"{name}: {unknown.pop()} is none of {', '.join(known)}")
    numbers = {key: value for key, value in values.items() if key != ABOVE}
    for key, value in numbers.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise InputError(f"{name}: {key}={value} must be a number from 0 on")
    return Price(**numbers, above=_above(name, values[ABOVE]) if ABOVE in values else {})


def _above(name: str, values: object) -> dict[int, Price]:
    """Read the prices of longer prompts, by the number of tokens that they exceed."""
    if not isinstance(values, Mapping):
        raise InputError(f"{name}: {ABOVE} must be like {{200000: {{input: 2, output: 8}}}}")
    for length in values:
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InputError(f"{name}: {ABOVE} has {length!r}, which is no number of tokens")
    return {
        length: _rates(f"{name}.{ABOVE}.{length}", value, NUMBERS)
        for length, value in values.items()
    }


class Money:
    """What was spent and what is reserved, in US dollars; for several threads.

    Args:
        limit: the most that may be spent.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.spent = 0.0
        # what further reservations must leave
        self.saved = 0.0
        self._reserved: list[float] = []
        self._changed = threading.Condition()

    def reserve(self, usd: float) -> bool:
        """Put so much aside if, were all of it spent, the limit would hold.

        Otherwise wait for what else is reserved, which may cost less in the end; return False if
        there is nothing to wait for.
        """
        with self._changed:
            while self.spent + sum(self._reserved) + usd + self.saved > self.limit:
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

    def is_short(self, usd: float) -> bool:
        """Return True if a request that may cost so much, and may be among what is reserved, could
        exceed the limit."""
        with self._changed:
            return self.spent + max(sum(self._reserved), usd) > self.limit

    def free(self, reserved: float) -> None:
        """Give back what was put aside, if it was."""
        with self._changed:
            if reserved in self._reserved:
                self._reserved.remove(reserved)
            self._changed.notify_all()

    def __str__(self) -> str:
        limit = "" if self.limit == math.inf else f" of ${self.limit:g}"
        return f"${self.spent:.4g}{limit} spent"
