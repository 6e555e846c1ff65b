"""The features of a request: what it brings, what a function of the user's own computes, and what
its messages say."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool

from knobwise.common.errors import InputError
from knobwise.experiments.serve.chat import ChatRequest, last_question


def counts_of(body: Mapping[str, Any], question: str) -> dict[str, float]:
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


class RequestFeatures:
    """Computes the features of requests.

    Args:
        compute: `compute(body)` returns features by name, or awaits them; None for no such
            function. A plain one works in a thread, so that other requests go on.
        prompt: the name of the user's last message as a feature.
        names: what the controller reads; nothing else is computed.
    """

    def __init__(
        self, compute: Callable[..., Any] | None, prompt: str, names: frozenset[str]
    ) -> None:
        self._compute = compute
        self._awaits = inspect.iscoroutinefunction(compute)
        self._prompt = prompt
        self._names = names

    async def of(self, chat: ChatRequest) -> dict[str, Any]:
        """Return the features of a request by name.

        Raises:
            Exception: what the user's function raises.
            InputError: it returned no features by name.
        """
        features: dict[str, Any] = {}
        if not self._names <= chat.features.keys():
            _, question = last_question(chat.body)
            features = {self._prompt: question, **counts_of(chat.body, question)}
        if self._compute is not None:
            if self._awaits:
                computed = await self._compute(chat.body)
            else:
                computed = await run_in_threadpool(self._compute, chat.body)
            if not isinstance(computed, Mapping):
                raise InputError(f"features: returned {type(computed).__name__}, not a dict")
            features |= computed
        return {**features, **chat.features}
