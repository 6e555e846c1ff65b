"""The tokens of a simulated language model: a chat template, a vocabulary, and probabilities, as
vLLM tells them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PIECE = re.compile(r"<\|im_(?:start|end)\|>|\n| ?[^\s<]{1,4}|.", re.DOTALL)
"""A token: a mark of the template, the end of a line, or up to four characters of a word."""
SURE = 0.5
"""The probability of a token that is no part of an answer."""
END = 0.9
"""That of the end of an answer."""
FILLERS = 20
"""Tokens beside the right one and the wrong one that may begin an answer."""
Message = Mapping[str, Any]


class NextToken(NamedTuple):
    """What is told of the next token."""

    text: str
    probability: float


def text_of(message: Message) -> str:
    """Return the text of a message, without what is no text."""
    content = message["content"]
    if isinstance(content, str):
        return content
    # a call of a tool has none
    return "\n".join(part["text"] for part in content or () if part["type"] == "text")


def render_messages(messages: Sequence[Message], generation_prompt: bool, goes_on: bool) -> str:
    """Return messages by the template; if the last one `goes_on`, without its end."""
    text = ""
    for message in messages:
        text += f"<|im_start|>{message['role']}\n{text_of(message)}<|im_end|>\n"
    if goes_on:
        return text.removesuffix("<|im_end|>\n")
    return text + "<|im_start|>assistant\n" * generation_prompt


def turns_of(prompt: str) -> list[Message]:
    """Return the messages of a plain prompt, whose lines are `Question: …` and `Answer: …`."""
    roles = {"Question": "user", "Answer": "assistant"}
    turns: list[Message] = []
    for line in prompt.splitlines():
        name, _, text = line.partition(":")
        if name in roles and text:
            turns.append({"role": roles[name], "content": text.strip()})
    return turns


def pieces(text: str) -> list[str]:
    """Split a text into tokens."""
    return PIECE.findall(text)


def token_number(piece: str) -> int:
    """Return the number of a token in the vocabulary."""
    digest = hashlib.blake2b(piece.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") // 2


def prompt_logprobs(text: str, answer: str, right: float, count: int) -> list[Any]:
    """Return what vLLM tells of the tokens of a prompt, for `prompt_logprobs=count`.

    Args:
        text: the prompt.
        answer: what the last turn answers; "" without an answer.
        right: the probability of each of its tokens.
    """
    whole = pieces(text)
    # the answer is the last time that its tokens come
    wanted = pieces(answer) and pieces(text[: text.rindex(answer) + len(answer)])
    first = len(pieces(text[: text.rindex(answer)].rstrip(" "))) if answer else len(whole)
    tokens: list[Any] = [None]
    for place, piece in enumerate(whole[1:], 1):
        probability = SURE
        if first <= place < len(wanted):
            probability = right
        elif answer and place == len(wanted):
            probability = END
        tokens.append(_place(piece, probability, count))
    return tokens


def _place(piece: str, probability: float, count: int) -> dict[str, Any]:
    """Return what is told of one token: itself, and the likeliest where that is another."""
    likeliest = probability >= 0.5
    rank = 1 if likeliest else 2
    entries = {str(token_number(piece)): _entry(piece, probability, rank)}
    if count and not likeliest:
        entries[str(token_number("?"))] = _entry("?", 1 - probability, 1)
    return entries


def _entry(piece: str, probability: float, rank: int) -> dict[str, Any]:
    # −inf is no JSON, so vLLM sends this
    log_prob = math.log(probability) if probability > 0 else -9999.0
    return {"logprob": log_prob, "rank": rank, "decoded_token": piece}


def next_place(right: str, wrong: str, probability: float) -> list[NextToken]:
    """Return all tokens that may begin an answer, the likeliest first: that of the right answer,
    that of a wrong one, and `FILLERS`."""
    left = 1 - probability
    tokens = [NextToken(pieces(right)[0], probability), NextToken(pieces(wrong)[0], 0.6 * left)]
    tokens += [NextToken(f"x{i}", 0.4 * left / FILLERS) for i in range(FILLERS)]
    return sorted(tokens, key=lambda token: -token.probability)


def top_logprobs(tokens: Sequence[NextToken], count: int) -> dict[str, Any]:
    """Return what the protocol tells of the first token of an answer."""
    entries = []
    for text, probability in tokens[: max(count, 1)]:
        entry = {"token": text, "logprob": math.log(max(probability, 1e-300))}
        entries.append(entry | {"bytes": list(text.encode())})
    return {"content": [{**entries[0], "top_logprobs": entries[:count]}], "refusal": None}
