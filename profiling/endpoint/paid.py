"""A client of an endpoint that pays for its requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.client import EndpointClient
from knobwise.profiling.endpoint.messages import images_in, most_tokens
from knobwise.profiling.endpoint.prices import Money, Price, answer_usd, lacking_tiers, read_prices
from knobwise.profiling.endpoint.reading import EndpointReply, ImpossibleTokens
from knobwise.profiling.endpoint.settings import LENGTHS, EndpointOptions
from knobwise.profiling.measuring.measuring import open_log

PAYMENTS = "payments.jsonl"
"""The file of what was paid, in the state folder. Before a request is sent, a line has the most
that it can cost; after its answer, a line has the difference to its price. So the sum is what was
paid, and the most that it can be if the process was killed in between. Other lines have the prices
at which it was paid, by model and tier."""


class PaidClient:
    """A client of one server, and what its requests cost. Close it at the end.

    Args:
        options: how it is asked, what that costs, and how much may be spent.
        priced: the fields `model` and, if it is set, `service_tier` of what is asked.

    Attributes:
        url: the address.
        prices: by model, of those that are asked; empty without prices.
        money: what was spent.

    Raises:
        InputError: prices that lack a model or its tier, an address that nothing answers at; see
            also `read_prices`.
    """

    def __init__(self, options: EndpointOptions, priced: Sequence[Mapping[str, Any]]) -> None:
        self.money = Money(options.max_usd or math.inf)
        self._prices_file = options.prices
        self._payments: BinaryIO | None = None
        self._open = ExitStack()
        self.prices: dict[str, Price] = {}
        if options.prices is not None:
            known = read_prices(options.prices)
            if unpriced := {fields["model"] for fields in priced}.difference(known):
                raise InputError(f"{options.prices}: has no price of {min(unpriced)}")
            self.prices = {fields["model"]: known[fields["model"]] for fields in priced}
            bodies = [{**(options.extra_body or {}), **fields} for fields in priced]
            if lacking := lacking_tiers(self.prices, bodies):
                raise InputError(f"{options.prices}: {lacking}")
        self._client = EndpointClient(options.endpoint, options.timeout_s)
        self.url = self._client.url
        try:
            self._client.check(options.concurrency, [*dict.fromkeys(f["model"] for f in priced)])
        except InputError:
            self.close()
            raise

    def keep(self, folder: Path, noted_elsewhere: float = 0.0) -> None:
        """Keep what is paid in a file of this folder, and count what earlier calls paid there.

        Args:
            folder: the state folder.
            noted_elsewhere: what was paid for all that the folder holds. It counts where this file
                is missing, as in folders of earlier versions.

        Raises:
            InputError: a damaged file, or one that another process writes; something was paid at
                other prices.
        """
        if not self.prices:
            return
        # what was paid before the folder was known belongs to the first one
        before = self.money.spent if self._payments is None else 0.0
        path = folder / PAYMENTS
        self._open.close()
        self._payments = self._open.enter_context(open_log(path))
        lines = path.read_bytes().splitlines()
        payments = []
        noted = {}
        try:
            for line in map(json.loads, lines):
                if "price_of" in line:
                    noted[line["price_of"]] = line["price"]
                else:
                    payments.append(line["usd"])
            spent = math.fsum(payments)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: is damaged ({error}), so that what was paid is not known; correct it, or "
                "choose another out folder"
            ) from error
        prices = _by_model_and_tier(self.prices)
        # a table must not mix prices, nor the sum that the limit is for
        if spent:
            self._refuse_other_prices(folder, noted, prices)
        self.money.spent = before + spent
        self._note(before)
        if not lines:
            self.money.spent += noted_elsewhere
            self._note(noted_elsewhere)
        for name, price in prices.items():
            if noted.get(name) != price:
                self._write({"price_of": name, "price": price})

    def _refuse_other_prices(
        self, folder: Path, noted: Mapping[str, Any], prices: Mapping[str, Any]
    ) -> None:
        """Raise InputError if prices differ from those that were noted of the same model."""
        differences = [
            f"{name}.{key}: {noted[name].get(key)} → {price.get(key)}"
            for name, price in prices.items()
            if name in noted
            for key in {**noted[name], **price}
            if noted[name].get(key) != price.get(key)
        ]
        if differences:
            raise InputError(
                f"{self._prices_file}: {folder.parent} was measured at other prices "
                f"({'; '.join(differences)}), which a table must not mix; give those prices again, "
                "or choose another out folder"
            )

    def _note(self, usd: float) -> None:
        """Note a payment where it is kept."""
        if usd:
            self._write({"usd": usd})

    def _write(self, line: Mapping[str, object]) -> None:
        """Write a line where payments are kept."""
        if self._payments is not None and not self._payments.closed:
            self._payments.write(json.dumps(line).encode() + b"\n")

    @property
    def progress(self) -> str:
        """What was spent, for people; "" without prices."""
        return str(self.money) if self.prices else ""

    @property
    def limit(self) -> str:
        """The setting that bounds what may be spent."""
        return f"max_usd={self.money.limit:g}"

    def most_usd(self, body: Mapping[str, Any]) -> float:
        """Return the most that a request can cost in US dollars; 0 without prices."""
        if not self.prices:
            return 0.0
        price = self.prices[body["model"]]
        # the lowest of several limits holds
        fields = {**body, **body.get("extra_body", {})}
        tokens_out = min(fields[name] for name in LENGTHS if name in fields)
        messages = body.get("messages") or [{"content": body["prompt"]}]
        images = images_in(messages) * price.image_tokens
        return price.most_usd(most_tokens(messages) + images, tokens_out)

    def reserve(self, body: Mapping[str, object]) -> bool:
        """Reserve what a request can cost at most; False if that is too much."""
        return self.money.reserve(self.most_usd(body))

    def ask(self, body: Mapping[str, object], whole: bool = False) -> tuple[EndpointReply, float]:
        """Send a request that was reserved or not, wait for its answer (see `EndpointClient.ask`),
        and pay for it; return its price in US dollars too.

        Raises:
            InputError: the server refuses the request as wrong, or keeps failing; more is spent
                than may be, on answers that broke.
        """
        most = self.most_usd(body)

        def lost() -> None:
            self.money.pay(most)
            # for the next attempt
            self._note(most)
            if self.money.is_short(most):
                raise InputError(f"{self.limit}: is spent on answers that broke")

        self._note(most)
        # what ends without an answer may have to be paid all the same, as after Ctrl-C
        usd = most
        try:
            try:
                reply = self._client.ask(body, lost, whole)
            except ImpossibleTokens:
                raise
            except InputError:
                # the last attempt was turned away, or is counted among those that were lost
                usd = 0.0
                raise
            usd = self._usd(reply, body, most)
        finally:
            self.money.pay(usd)
            self.money.free(most)
            self._note(usd - most)
        return reply, usd

    def _usd(self, reply: EndpointReply, body: Mapping[str, Any], most: float) -> float:
        """Return the price of an answer; of one that was given up, the most that it can be."""
        if not self.prices:
            return 0.0
        if reply.failed and not reply.counted:
            return most
        price = self.prices[body["model"]]
        # what was asked for, where the answer does not say
        tier = reply.service_tier or body.get("service_tier")
        usd = answer_usd(price, reply.usage, tier, bool(reply.text))
        if not math.isnan(usd):
            return usd
        if price.in_tier(tier) is None:
            raise InputError(
                f"prices: has no price of service_tier={str(tier)[:40]}, in which "
                f"{body['model']} answered"
            )
        raise InputError(
            "prices: the server does not count the tokens of its answers; leave out prices"
        )

    def close(self) -> None:
        """Close the connections and the file."""
        self._client.close()
        self._open.close()


def _by_model_and_tier(prices: Mapping[str, Price]) -> dict[str, Any]:
    """Return prices as JSON holds them, each tier by itself: a model may get further ones."""
    plain = {}
    for model, price in prices.items():
        for tier, of_tier in {"": price, **price.tiers}.items():
            rates = {name: value for name, value in asdict(of_tier).items() if name != "tiers"}
            plain[f"{model}.{tier}" if tier else model] = rates
    # lengths of prompts become texts
    known: dict[str, Any] = json.loads(json.dumps(plain))
    return known
