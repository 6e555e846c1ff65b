"""Knobs as fields of a request, and what a client has set there itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from knobwise.agents.deployed.arrays import Array
from knobwise.common.errors import InputError
from knobwise.common.words import spelled
from knobwise.profiling.endpoint.settings import LENGTHS
from knobwise.serving.proxy.chat import last_question
from knobwise.serving.proxy.responses import is_settable

if TYPE_CHECKING:
    from knobwise.profiling.endpoint.messages import Message, MessageFunction

OUR_MODELS = ("auto", "knobwise")
"""Names that no endpoint knows."""
OPEN_MODELS = (None, "", *OUR_MODELS)
"""What a client gives as `model` to leave it to us."""
FIELDS = frozenset((
    "model", "max_tokens", "max_completion_tokens", "reasoning_effort", "verbosity", "service_tier",
    "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty",
    "logprobs", "top_logprobs", "logit_bias", "parallel_tool_calls", "tool_choice", "store",
    "function_call", "response_format", "prediction", "modalities", "audio", "metadata",
    "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "user", "web_search_options",
))  # fmt: skip
"""Knobs of these names are fields of a request, as the protocol has them."""


LARGEST = 2**63
"""A limit of tokens that no server counts to."""


class Freedom(NamedTuple):
    """What a client leaves open."""

    allowed: Array | None
    """The configurations that may be chosen, bool [C]; None for all."""
    capped: bool = False
    """True if none is as short as the client wants it: the shortest are allowed, and cut. Also if
    that is shorter than the length in a field of every request."""


class KnobFields:
    """Sets the knobs of a controller in requests.

    Args:
        configurations: the knob values of each configuration.
        messages: `messages(question, knobs)` returns the messages that stand for the user's last
            one; None to leave it as it is, if every knob is a field.
        extra: further fields of every request, unless a client sets them; a knob of the same name
            sets the field.
        override: True to set knobs whatever the client has set.

    Raises:
        InputError: a knob is no field, and there is no function for it.
    """

    def __init__(
        self,
        configurations: Sequence[Mapping[str, object]],
        messages: MessageFunction | None = None,
        extra: Mapping[str, object] | None = None,
        override: bool = False,
    ) -> None:
        self._configurations = configurations
        self._messages = messages
        self._extra = dict(extra or {})
        self._override = override
        known = FIELDS | self._extra.keys()
        self._names = [name for name in configurations[0] if name in known]
        others = [name for name in configurations[0] if name not in known]
        if others and messages is None:
            raise InputError(
                f"messages: knob {others[0]} is no field of a request; name it as the field it "
                "sets, such as model, and train again; or give messages=module:function(question, "
                "knobs), with which the profile was measured; or, if the server knows such a "
                f"field, extra_body={{{others[0]}: {self._configurations[0][others[0]]}}}, which "
                "the policy then sets"
            )

    def freedom(self, body: Mapping[str, object]) -> Freedom | None:
        """Return which configurations are within what a client has set itself; None if it gave a
        knob a value that no configuration has, so that nothing can be expected of any.

        Raises:
            InputError: a length that nobody can count with; such a value, where no endpoint knows
                the model that is asked for.
        """
        cap = self._cap(body)
        # a client's length goes before one of `extra`, whatever is overridden
        capped = cap is not None and cap < self._extra_length()
        if self._override:
            return Freedom(None, capped)
        allowed = np.ones(len(self._configurations), bool)
        # values first: they hold whatever the length
        for name in self._names:
            value = body.get(name)
            if name in LENGTHS or value is None or (name == "model" and value in OPEN_MODELS):
                continue
            within = allowed & [_is_same(values[name], value) for values in self._configurations]
            if not within.any():
                known = zip(self._configurations, allowed, strict=True)
                self.refuse_open(body, name, [values[name] for values, may in known if may])
                return None
            allowed = within
        for name in self._names:
            if name not in LENGTHS or cap is None:
                continue
            # None is a length without an end
            lengths = np.array([_number(values[name]) for values in self._configurations])
            within = allowed & (lengths <= cap)
            if not within.any():
                # the client must not get more than it asked for, so the answer is cut
                capped = True
                within = allowed & (lengths == lengths[allowed].min())
            allowed = within
        return Freedom(None if allowed.all() else allowed, capped)

    def refuse_open(
        self, body: Mapping[str, object], name: str, known: Sequence[object] = ()
    ) -> None:
        """Refuse a request that would have to pass unchanged because of a field, but leaves the
        model to us by a name that no endpoint knows.

        Args:
            body: the client's.
            name: the field.
            known: its values that were measured.

        Raises:
            InputError: it is one.
        """
        is_ours = "model" in self._names and body.get("model") in OUR_MODELS
        if not is_ours or "model" in self._extra:
            return
        value = json.dumps(body.get(name, True))
        measured = ", ".join(json.dumps(each) for each in dict.fromkeys(known))
        raise InputError(
            f"{name}={value:.60}: nothing is decided for such a request"
            f"{f'; what was measured is {measured}' if known else ''}; change it, or give a model "
            f"of your endpoint in place of {body['model']}"
        )

    def is_measured(self, body: Mapping[str, object], cut: bool, tokens: float) -> bool:
        """Return False for an answer whose length is not as measured, since the client set another
        one, so that its time says nothing of a setting.

        Args:
            body: the client's.
            cut: whether the answer ended because it was as long as it may be.
            tokens: of the answer; NaN if nobody counted them.
        """
        cap = self._cap(body)
        if cap is None or any(name in LENGTHS for name in self._names):
            return True
        measured = self._extra_length()
        if cap > measured > 0:
            # what ended by itself is as it was measured, as far as it is known
            return tokens <= measured
        return not cut or cap == measured

    def may_be_longer(self, body: Mapping[str, object]) -> bool:
        """Return True if the client wants longer answers than were measured."""
        cap = self._cap(body)
        return cap is not None and cap > self._extra_length() > 0

    def of_fields(self, knobs: Mapping[str, object]) -> dict[str, object]:
        """Return the knobs that are fields of a request, which need no function of the messages."""
        return {name: value for name, value in knobs.items() if name in self._names}

    def sent(self, body: Mapping[str, object], knobs: Mapping[str, object]) -> dict[str, object]:
        """Return the knobs as they are sent: no longer than the client wants an answer."""
        cap = None if self._override else self._cap(body)
        values = dict(knobs)
        for name in LENGTHS:
            if cap is not None and name in values and _number(values[name]) > cap:
                values[name] = cap
        return values

    def set(
        self, body: Mapping[str, Any], knobs: Mapping[str, object], with_messages: bool = True
    ) -> dict[str, Any]:
        """Return the body with these knobs.

        Args:
            with_messages: False to leave the messages as they are.

        Raises:
            Exception: what the user's function of the messages raises.
        """
        changed = self.with_extra(body)
        for name in self._names:
            if name in LENGTHS:
                # by the name of the profile alone, since servers may know one of the two only
                for other in LENGTHS:
                    changed.pop(other, None)
            changed[name] = knobs[name]
            # null stands for a field that is left out
            if knobs[name] is None:
                del changed[name]
        if with_messages and self._messages is not None:
            # what came before the question stays before it
            index, question = last_question(body)
            messages = list(body.get("messages") or [])
            index = len(messages) if index < 0 else index
            replaced = self._messages(question, dict(knobs))
            for message in messages[index : index + 1]:
                replaced = _with_parts(replaced, message.get("content"))
            changed["messages"] = [*messages[:index], *replaced, *messages[index + 1 :]]
        return changed

    def with_extra(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body with the further fields that the client does not set."""
        fields = dict(body)
        if "model" in self._extra and fields.get("model") in OPEN_MODELS:
            fields.pop("model", None)
        cap = self._cap(body)
        for name in LENGTHS:
            # a client's length, by the name with which the profile was measured
            if name in self._extra and cap is not None:
                fields = {key: value for key, value in fields.items() if key not in LENGTHS}
                fields[name] = cap
        return {**self._extra, **fields}

    @property
    def texts_of_truth(self) -> list[str]:
        """The fields that are set to the texts "true" and "false" alone: servers take any text for
        true. Controllers of earlier versions have them where true and false were measured."""
        return [
            name
            for name in self._names
            if {values[name] for values in self._configurations} <= {"true", "false"}
        ]

    @property
    def are_of_responses(self) -> bool:
        """True if all knobs can be set in a request to /v1/responses as it is."""
        fields = len(self._names) == len(self._configurations[0]) and self._messages is None
        return fields and all(is_settable(name) or name in self._extra for name in self._names)

    def index_of(self, knobs: Mapping[str, object]) -> int:
        """Return the configuration with these knobs. Raises InputError if there is none."""
        # one of few, once, when the server starts; controllers of earlier versions have text for
        # true and false, which people then wrote here
        wanted = {name: spelled(value) for name, value in knobs.items()}
        for index, values in enumerate(self._configurations):
            if {name: spelled(value) for name, value in values.items()} == wanted:
                return index
        raise InputError(
            f"default={dict(knobs)}: is no configuration; one is {dict(self._configurations[0])}"
        )

    def _extra_length(self) -> float:
        """Return how long an answer may be by `extra`, with which the profile was measured; −∞ if
        it says nothing of that, or a knob sets it."""
        known = [name for name in LENGTHS if type(self._extra.get(name)) is int]
        lengths = [_number(self._extra[name]) for name in known]
        if not lengths or any(name in LENGTHS for name in self._names):
            return -np.inf
        return min(lengths)

    def _cap(self, body: Mapping[str, Any]) -> int | None:
        """Return the client's own limit of tokens; None for none, or for what is no number. Raises
        InputError for a number that nobody can count with."""
        caps = {name: body[name] for name in LENGTHS if type(body.get(name)) is int}
        for name, cap in caps.items():
            if not abs(cap) < LARGEST:
                raise InputError(f"{name}: is too large")
        # of both names, the smaller counts
        return min(caps.values(), default=None)


def _with_parts(messages: list[Message], content: object) -> list[Message]:
    """Return messages with what is no text in a content, such as images, before the text of the
    last one of the user."""
    parts = content if isinstance(content, list) else []
    others = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "text")]
    users = [message for message in messages if message.get("role") == "user"]
    if others and users:
        text = users[-1]["content"]
        texts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        users[-1]["content"] = [*others, *texts]
    return messages


def _is_same(value: object, other: object) -> bool:
    """Return whether two values of a field are the same in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _number(value: object) -> float:
    """Return a knob's value as a length."""
    return float(value) if isinstance(value, int | float) else np.inf
