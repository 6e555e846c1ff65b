"""A request to /v1/chat/completions or /v1/responses: what is ours in it, and its features."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from knobwise.agents.deployed.arrays import with_inner
from knobwise.common.errors import InputError
from knobwise.envs.tables.units import MS
from knobwise.profiling.endpoint.messages import BLOCK, prompt_features
from knobwise.serving.proxy.responses import as_chat

LIMITS_HEADER = "x-limits"
OURS = ("budget_ms", "limits", "features")
"""Fields of a body that the endpoint does not get to see; one of a budget in another unit is
another, see `budget_field`."""
ALIKE = 0.85
"""From this similarity on, a field is taken for a mistyped one of ours: a letter more or less."""


class ChatRequest(NamedTuple):
    """A request as it was sent."""

    content: bytes
    """The body, byte for byte."""
    body: dict[str, Any]
    """The body without the fields that are ours."""
    chat: dict[str, Any]
    """The same as a request to /v1/chat/completions."""
    lost: Sequence[str]
    """What such a request cannot hold."""
    is_plain: bool
    """True if none of ours was in it."""
    budget: object
    """The budget as it was given; None for none."""
    limits: Mapping[str, Any] | None
    """Further limits as they were given; None for none."""
    features: Mapping[str, object]
    """Features that it brings."""


def budget_field(unit: str) -> str:
    """Return the name of the field with the budget: budget_ms, or budget_usd for US dollars."""
    return "budget_" + re.sub(r"\W+", "_", unit.lower(), flags=re.ASCII)


def budget_header(unit: str) -> str:
    """Return the name of the header with the budget, such as x-budget-ms."""
    return "x-" + budget_field(unit).replace("_", "-")


def parse(
    content: bytes, headers: Mapping[str, str], unit: str = MS, of_responses: bool = False
) -> ChatRequest:
    """Read a request. Its fields go before its headers.

    Args:
        headers: by names in lower case.
        unit: of budgets.
        of_responses: True for one to /v1/responses.

    Raises:
        InputError: no JSON object, a header that is none, features that have no names, a budget in
            another unit, a field that looks like one of ours.
    """
    body = json_object(content)
    field = budget_field(unit)
    header = budget_header(unit)
    # the official client puts what it is given as `extra_body` beside the other fields
    ours = {name: body.pop(name) for name in {*OURS, field} if name in body}
    budget = ours.get(field)
    limits = ours.get("limits")
    of_headers = {name[2:].replace("-", "_") for name in headers if name.startswith("x-budget-")}
    refuse_other_units({*body, *ours, *of_headers}, unit)
    longest = 2 * max(map(len, (field, *OURS)))
    for name in body:
        # one that is far longer is no mistyped one, and is not kept in memory
        if len(name) <= longest and (meant := _meant(name, field)):
            raise InputError(f"{name}: is no field; did you mean {meant}?")
    # a gateway may add headers where it cannot change bodies
    if budget is None and header in headers:
        try:
            budget = float(headers[header])
        except ValueError as error:
            raise InputError(f"{header}: must be a number, in {unit}") from error
    if limits is None and LIMITS_HEADER in headers:
        limits = json_object(headers[LIMITS_HEADER].encode(), LIMITS_HEADER)
    features = ours.get("features") or {}
    if not isinstance(features, dict):
        raise InputError("features: must be values by name")
    chat, lost = as_chat(body) if of_responses else (body, [])
    plain = not ours
    return ChatRequest(content, body, chat, lost, plain, budget, as_limits(limits), features)


def refuse_other_units(names: Collection[str], unit: str) -> None:
    """Refuse a request with fields of these names if one is of a budget in another unit: 800 ms
    must not become 800 dollars. Raises InputError for it."""
    field = budget_field(unit)
    others = {name for name in names if name.startswith("budget_")} - {field, "budget_tokens"}
    if others:
        raise InputError(f"{min(others)}: the budgets of this server are in {unit}; send {field}")


def as_limits(limits: Any) -> dict[str, Any] | None:
    """Return the limits on further costs that a request holds. Raises InputError for what are no
    limits by name."""
    if not isinstance(limits, dict | None):
        raise InputError('limits: must be limits by name, such as {"usd": 0.002}')
    return limits


@functools.lru_cache(maxsize=1024)
def _meant(name: str, field: str) -> str:
    """Return the field of ours that a name looks like; "" for none. `field` is that of budgets."""
    ours = (field, *OURS[1:])
    return next(iter(get_close_matches(name.lower(), ours, 1, ALIKE)), "")


def json_object(content: bytes, name: str = "the body") -> dict[str, Any]:
    """Read a JSON object. Raises InputError if it is none."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            raise TypeError(f"{name} must be a JSON object")
        return body
    except (OverflowError, RecursionError, TypeError, ValueError) as error:
        # also half of a character, or brackets without an end
        raise InputError(f"{name}: {error}") from error


def last_question(body: Mapping[str, object]) -> tuple[int, str]:
    """Return the index of the user's last message, and its text, parts joined by line breaks; −1
    and "" without one."""
    messages = body.get("messages")
    # what is malformed is left to the endpoint, which says so
    if isinstance(messages, list):
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            if isinstance(message, dict) and message.get("role") == "user":
                return index, message_text(message.get("content"))
    return -1, ""


def message_text(content: object) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def count_request(body: Mapping[str, object], question: str) -> dict[str, float]:
    """Return what can be counted in a request: characters and words of the user's last message,
    messages, images and tools."""
    messages = body.get("messages")
    messages = messages if isinstance(messages, list) else []
    images = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        kinds = [part.get("type") for part in parts if isinstance(part, dict)]
        images += kinds.count("image_url")
    tools = body.get("tools")
    return {
        "prompt_characters": len(question),
        "prompt_words": len(question.split()),
        "messages": len(messages),
        "images": images,
        "tools": len(tools) if isinstance(tools, list) else 0,
    }


class MissingFeatures(InputError):
    """Features that a request lacks. The message has their names, and nothing of the request."""


class RequestFeatures:
    """Computes the features of requests.

    Args:
        compute: `compute(body)` returns features by name, or awaits them; None for no such
            function. `body` is that of a chat. A plain one works in a thread, so that other
            requests go on.
        prompt: the name of the user's last message as a feature.
        blocks: the feature blocks that the controller reads.
        columns: the names of those in the block `features`, if they have names.
    """

    def __init__(
        self,
        compute: Callable[..., Any] | None,
        prompt: str,
        blocks: Collection[str],
        columns: Collection[str],
    ) -> None:
        self._compute = compute
        self._awaits = inspect.iscoroutinefunction(compute)
        self._prompt = prompt
        self._named = frozenset(columns)
        self._names = frozenset(blocks)
        if columns:
            self._names = self._names - {"features"} | self._named

    @property
    def only_from_requests(self) -> str:
        """The names of the features that nothing here computes; "" for none, or if the user's own
        function may."""
        if self._compute is not None:
            return ""
        known = {self._prompt, *count_request({}, ""), BLOCK}
        return ", ".join(sorted(self._names - known))

    async def computed(self, chat: ChatRequest) -> dict[str, Any]:
        """Return the features of a request by name.

        Raises:
            Exception: what the user's function raises.
            InputError: it returned no features by name.
            MissingFeatures: some are known from nowhere.
        """
        features: dict[str, Any] = {}
        brought = with_inner(chat.features, self._names)
        # nothing is counted in vain
        if not self._names <= brought.keys():
            _, question = last_question(chat.chat)
            counts = count_request(chat.chat, question)
            # the policy knows which messages it reads
            features = {self._prompt: chat.chat.get("messages") or "", **counts}
            if BLOCK in self._names:
                features |= prompt_features(question, round(counts["images"]))
        if self._compute is not None:
            if self._awaits:
                values = await self._compute(chat.chat)
            else:
                values = await asyncio.to_thread(self._compute, chat.chat)
            if not isinstance(values, Mapping):
                raise InputError(f"features: returned {type(values).__name__}, not a dict")
            features |= with_inner(values, self._names)
        features |= brought
        # the block of the columns may be given instead
        needed = self._names - self._named if "features" in features else self._names
        if missing := needed - features.keys():
            raise MissingFeatures(f"no {', '.join(sorted(missing))}")
        return features
