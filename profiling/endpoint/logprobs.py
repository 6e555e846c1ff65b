"""What a server says of the probabilities of tokens, in the two forms in which servers say it.

- `prompt_logprobs`, a field that vLLM adds to the protocol, tells of each token of the prompt, so
  of answers of any length.
- `logprobs` with `top_logprobs`, of the protocol itself, tells of the likeliest next tokens, so of
  answers of one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PROMPT = "prompt_logprobs"
NEXT = "top_logprobs"
LIKELIEST = 20
"""As many next tokens as the protocol lets ask for."""


class PromptToken(NamedTuple):
    """A token of a prompt, after those before it."""

    number: int
    """The token, by its number in the vocabulary; −1 for the first one, of which nothing is
    told."""
    log_prob: float
    """ln P of it."""
    likeliest: float
    """ln P of the likeliest token in its place."""


def prompt_tokens(content: Mapping[str, Any]) -> list[PromptToken] | None:
    """Read the tokens of a prompt from an answer to a request with `prompt_logprobs=1`; None where
    the server gives none.

    Raises ValueError for another form than vLLM's.
    """
    places = content.get(PROMPT)
    # of a plain prompt it stands in the logprobs
    if places is None:
        places = content["choices"][0].get(PROMPT)
    if places is None:
        return None
    try:
        return [_prompt_token(place) for place in places]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{PROMPT} of another form than vLLM's ({error!r})") from error


def _prompt_token(place: Mapping[str, Mapping[str, Any]] | None) -> PromptToken:
    """Read one token: {"785": {"logprob": -0.5, "rank": 2, "decoded_token": "The"}, …}, which holds
    the token itself and the likeliest one."""
    if place is None:
        return PromptToken(-1, 0.0, 0.0)
    entries = [(int(number), entry) for number, entry in place.items()]
    # the token itself comes first, and has the larger rank if it is not the likeliest
    number, chosen = max(entries, key=lambda entry: entry[1].get("rank") or 0)
    likeliest = max(entry["logprob"] for _, entry in entries)
    return PromptToken(number, float(chosen["logprob"]), float(likeliest))


def next_tokens(content: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """Read the likeliest first tokens of an answer, with ln P of each; None where the server gives
    none.

    Raises ValueError for another form than the protocol's.
    """
    logprobs = content["choices"][0].get("logprobs")
    if not logprobs or not logprobs.get("content"):
        return None
    try:
        entries = logprobs["content"][0][NEXT]
        return [(str(entry["token"]), float(entry["logprob"])) for entry in entries] or None
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{NEXT} of another form than the protocol's ({error!r})") from error


class TokenChance(NamedTuple):
    """How likely an answer of one token is."""

    log_prob: float
    """ln P of it, or the most that it can be."""
    likeliest: float
    """ln P of the likeliest token."""
    listed: bool
    """Whether it was among the tokens that the server listed."""


def token_chance(answer: str, tokens: Sequence[tuple[str, float]]) -> TokenChance:
    """Return how likely an answer is, from the likeliest tokens in its place.

    Tokens that spell it with white space before or after it count together. An answer that none of
    them spells has at most the probability of the least likely one, and at most what all of them
    leave.
    """
    likeliest = max(log_prob for _, log_prob in tokens)
    same = [math.exp(log_prob) for token, log_prob in tokens if token.strip() == answer.strip()]
    if same:
        return TokenChance(math.log(max(sum(same), 1e-300)), likeliest, True)
    left = 1.0 - sum(math.exp(log_prob) for _, log_prob in tokens)
    most = min(log_prob for _, log_prob in tokens)
    # what is left may be nothing but rounding
    return TokenChance(min(most, math.log(max(left, 1e-12))), likeliest, False)
