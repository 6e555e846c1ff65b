"""Simulated language models: whether an answer is right, and how long it takes, follows from the
model (`MODELS`), `max_tokens`, `reasoning_effort` and the question, so the same request always gets
the same answer. They know sums and the questions of SmolLM2 that come with knobwise.

`simulated_endpoint` serves them; `Simulation` lists what a request there can suffer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import polars as pl

from knobwise.profiling.huggingface.smollm import QUESTIONS_CSV
from knobwise.testbeds.simulated_tokens import (
    next_place,
    pieces,
    prompt_logprobs,
    render_messages,
    text_of,
    top_logprobs,
    turns_of,
)


class SimulatedModel(NamedTuple):
    """A simulated model."""

    skill: float
    """The difficulty up to which it is right without thinking."""
    first_s: float
    """Seconds to its first token, without thinking."""
    token_s: float
    """Seconds for each token, those of thinking included."""


MODELS = {
    "small": SimulatedModel(0.44, 0.10, 0.004),
    "medium": SimulatedModel(0.50, 0.20, 0.010),
    "large": SimulatedModel(0.58, 0.40, 0.020),
}
THINKING = {"none": 0, "minimal": 5, "low": 20, "medium": 60, "high": 150}
"""The tokens of thought on a question of middling difficulty, by `reasoning_effort`."""
FAULTS = ("401", "429", "500", "cut", "json", "refusal")
LOGPROBS = ("vllm", "openai", "none", "refused")
REFUSAL = "I cannot help with that."
WRONG = "I do not know"


@dataclass(frozen=True)
class Simulation:
    """What a request is to suffer.

    Attributes:
        fault: one of `FAULTS`: an error with this status (429 says when to come again, `retry_s`);
            the connection cut in the middle of the answer; an answer that is no JSON; a refusal.
        times: how many equal requests the fault meets, 0 for all. Later ones are answered.
        retry_s: seconds after which a 429 says to come again.
        first_ms: time to the first byte, whatever `delay` is; negative as the model has it.
        chunks: so many chunks of text, whatever the answer; 0 for one a word.
        chunk_ms: time between two chunks, whatever `delay` is; negative as the model has it.
        stream: 0 for an answer in one piece, also where a stream is asked for.
        logprobs: one of `LOGPROBS`: what is told of the probabilities of tokens. vllm tells of the
            prompt and of the answer; openai of the answer; none ignores such fields, and refused
            refuses them.
    """

    fault: str = ""
    times: int = 0
    retry_s: float = 0.02
    first_ms: float = -1.0
    chunks: int = 0
    chunk_ms: float = -1.0
    stream: int = 1
    logprobs: str = "vllm"

    @classmethod
    def parse(cls, text: str) -> Simulation:
        """Read `fault=429&times=1`. Raises ValueError for anything else."""
        values: dict[str, Any] = {}
        for name, value in parse_qsl(text, strict_parsing=bool(text)):
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"{name} is none of {', '.join(cls.__dataclass_fields__)}")
            values[name] = type(getattr(cls, name))(value)
        simulation = cls(**values)
        if simulation.fault and simulation.fault not in FAULTS:
            raise ValueError(f"fault={simulation.fault} is none of {', '.join(FAULTS)}")
        if simulation.logprobs not in LOGPROBS:
            raise ValueError(f"logprobs={simulation.logprobs} is none of {', '.join(LOGPROBS)}")
        return simulation


class SimulatedReply(NamedTuple):
    """What a model answers, and how long it takes."""

    words: tuple[str, ...]
    finish: str
    prompt_tokens: int
    thinking: int
    first_s: float
    word_s: float

    def usage(self) -> dict[str, Any]:
        """Return the tokens as the protocol has them."""
        output = self.thinking + len(self.words)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "completion_tokens_details": {"reasoning_tokens": self.thinking},
        }


def hash_to_share(*parts: object) -> float:
    """Return a number in [0, 1) that follows from the parts."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class KnownQuestion(NamedTuple):
    """A question that comes with knobwise."""

    answer: str
    kind: str


@functools.cache
def known_questions() -> Mapping[str, KnownQuestion]:
    """Return the questions that come with knobwise, by their text."""
    questions = pl.read_csv(QUESTIONS_CSV, infer_schema=False)
    known = map(KnownQuestion, questions["answer"], questions["question_type"])
    return dict(zip(questions["question"], known, strict=True))


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message of the user, without what is no text."""
    for message in reversed(messages):
        if message["role"] == "user":
            return text_of(message)
    return ""


def known_in(text: str) -> KnownQuestion | None:
    """Return the last known question that is a line of the text."""
    lines = [line.strip() for line in reversed(text.splitlines())]
    return next((known_questions()[line] for line in lines if line in known_questions()), None)


def kind_of(text: str) -> str:
    """Return the kind of a question; of a sum, how many digits it has."""
    known = known_in(text)
    return known.kind if known else f"{sum(map(str.isdigit, text))} digits"


def difficulty_of(text: str, model: str) -> float:
    """Return how difficult a question is for a model, from 0 to 1. Most of it follows from the kind
    of question (of a sum, from its length), and every model is better at some kinds."""
    known = known_in(text)
    digits = sum(map(str.isdigit, text))
    kind = kind_of(text)
    of_kind = hash_to_share(kind) if known else min(digits / 12, 1.0)
    for_model = hash_to_share(kind, model)
    of_question = (hash_to_share(text) + hash_to_share(text, model)) / 2
    return 0.2 * of_kind + 0.4 * for_model + 0.4 * of_question


def right_answer(text: str) -> str:
    """Return the answer to a sum, or to a known question that is a line of the text."""
    if known := known_in(text):
        return known.answer
    if terms := re.search(r"(\d{1,9})\s*([-+*])\s*(\d{1,9})", text):
        first, sign, second = terms.groups()
        results = {"+": int(first) + int(second), "-": int(first) - int(second)}
        return str(results.get(sign, int(first) * int(second)))
    return WRONG


def chance_right(messages: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the probability of each token of the right answer to the last question, after the
    questions before it: each of its own kind makes it easier by .3."""
    questions = [text_of(message) for message in messages if message["role"] == "user"]
    if not questions:
        return 0.0
    *shots, question = questions
    alike = sum(kind_of(shot) == kind_of(question) for shot in shots)
    ease = MODELS[name].skill + 0.3 * alike - difficulty_of(question, name)
    return 1 / (1 + math.exp(-8 * ease))


def facts_of(body: Mapping[str, Any], name: str, simulation: Simulation) -> dict[str, Any]:
    """Return what a whole answer tells of the probabilities of tokens: `tokens`, how many the
    prompt has; `text`, the answer, where it follows from them; and the fields `prompt_logprobs` and
    `logprobs` where they are asked for and given."""
    plain = "prompt" in body
    messages = turns_of(body["prompt"]) if plain else list(body["messages"])
    text = body.get("prompt", "")
    if not plain:
        open_ended = bool(body.get("continue_final_message"))
        text = render_messages(messages, body.get("add_generation_prompt", True), open_ended)
    facts: dict[str, Any] = {"tokens": len(pieces(text))}
    right = chance_right(messages, name)
    wanted = right_answer(question_of(messages))
    answer = ""
    if messages and messages[-1]["role"] == "assistant":
        answer = text_of(messages[-1])
        right = right if answer == wanted else (1 - right) / 2
    if simulation.logprobs == "vllm" and body.get("prompt_logprobs") is not None:
        facts["prompt_logprobs"] = prompt_logprobs(text, answer, right, body["prompt_logprobs"])
    if simulation.logprobs in ("vllm", "openai") and body.get("logprobs") and not plain:
        tokens = next_place(wanted, WRONG, right)
        facts["logprobs"] = top_logprobs(tokens, body.get("top_logprobs") or 0)
        # greedy decoding gives the likeliest token
        likeliest = wanted if tokens[0].text == pieces(wanted)[0] else WRONG
        facts["text"] = "".join(pieces(likeliest)[: body.get("max_tokens")])
    return facts


def reply_to(
    body: Mapping[str, Any], name: str, simulation: Simulation, delay: float
) -> SimulatedReply:
    """Answer a request; see the module. Raises KeyError or TypeError for a body that lacks what
    the protocol demands."""
    model = MODELS[name]
    text = question_of(body["messages"])
    effort = body.get("reasoning_effort") or "none"
    difficulty = difficulty_of(text, name)
    thinking = round(THINKING[effort] * (0.2 + difficulty))
    words = [WRONG]
    if difficulty < model.skill + 0.15 * (thinking / 150) ** 0.5:
        words = right_answer(text).split()
    finish = "stop"
    if simulation.fault == "refusal":
        words = REFUSAL.split()
        thinking = 0
    if simulation.chunks:
        words = [f"word{i}" for i in range(simulation.chunks)]
    most = body.get("max_completion_tokens") or body.get("max_tokens") or 4096
    if thinking + len(words) > most:
        # thought comes first, so nothing may be left for the answer
        thinking = min(thinking, most)
        words = words[: most - thinking]
        finish = "length"
    first_s = delay * (model.first_s + model.token_s * thinking)
    word_s = delay * model.token_s
    if simulation.first_ms >= 0:
        first_s = simulation.first_ms / 1000
    if simulation.chunk_ms >= 0:
        word_s = simulation.chunk_ms / 1000
    prompt_tokens = len(json.dumps(body["messages"])) // 4
    return SimulatedReply(tuple(words), finish, prompt_tokens, thinking, first_s, word_s)
