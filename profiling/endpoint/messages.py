"""The chat messages of a request, and what is known of it before it is sent."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable, in_a_line

if TYPE_CHECKING:
    from PIL import Image

Message = dict[str, Any]
MessageFunction = Callable[[str, Mapping[str, Any]], list[Message]]
"""Takes a question and a value for each knob."""
BLOCK = "prompt_features"
"""The name of the features."""


def message_function(name: str | None) -> MessageFunction:
    """Return the function that a setting names, the same in measuring and in serving; without one
    the question is the only message.

    Raises InputError if there is no such function.
    """
    if name is None:
        return lambda question, knobs: [{"role": "user", "content": question}]
    function = import_callable(f"messages={name}", name, "function", "my_module:messages")

    def checked(question: str, knobs: Mapping[str, Any]) -> list[Message]:
        try:
            messages = function(question, dict(knobs))
            # a copy, and it must be of what JSON holds
            messages = json.loads(json.dumps(messages))
            if not messages or any("role" not in message for message in messages):
                raise TypeError("must return a list of messages, {role: …, content: …}")
        # code of the user's own may raise anything
        except Exception as error:
            raise InputError(f"messages={name}: {in_a_line(error)}") from error
        return list(messages)

    return checked


def with_image(messages: list[Message], image: Image.Image | None) -> list[Message]:
    """Return messages with a picture before the text of the last one of the user; None leaves them
    as they are."""
    if image is None:
        return messages
    # photographs would be several times as large as PNG
    encoded = io.BytesIO()
    image.convert("RGB").save(encoded, "JPEG", quality=95)
    url = "data:image/jpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
    # the last that is of the user
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise InputError("messages: none of them is of the user, so that an image has no place")
    content = users[-1]["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    users[-1]["content"] = [{"type": "image_url", "image_url": {"url": url}}, *content]
    return messages


def images_in(messages: list[Message]) -> int:
    """Count the images of messages."""
    count = 0
    for message in messages:
        if isinstance(message.get("content"), list):
            count += sum(part.get("type") == "image_url" for part in message["content"])
    return count


def most_tokens(messages: list[Message]) -> int:
    """Return a number of tokens that the text of messages does not exceed: a token is at least a
    byte, and each message has a few of its own."""
    count = 16
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        count += 16 + len(str(content).encode())
    return count


def prompt_features(text: str, images: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return what a decision may see of a request without reading it: {`BLOCK`: float32 [7]}.

    These are ln(1 + count) of its characters, words and lines; the shares of digits, capitals and
    characters outside ASCII; and the number of its images.
    """
    # shares of an empty text are 0
    length = max(len(text), 1)
    values = [math.log1p(count) for count in (len(text), len(text.split()), text.count("\n"))]
    for kind in (str.isdigit, str.isupper):
        values.append(sum(map(kind, text)) / length)
    values.append(sum(not character.isascii() for character in text) / length)
    return {BLOCK: np.array([*values, images], np.float32)}
