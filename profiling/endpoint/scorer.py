"""Score demonstrations with a model behind an endpoint: how likely it gives a query's answers after
them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knobwise.common.errors import InputError
from knobwise.profiling.endpoint.client import Declined
from knobwise.profiling.endpoint.logprobs import (
    LIKELIEST,
    NEXT,
    PROMPT,
    PromptToken,
    next_tokens,
    prompt_tokens,
    token_chance,
)
from knobwise.profiling.endpoint.paid import PaidClient
from knobwise.profiling.endpoint.prompts import ChatForm, Fields, PlainForm, PromptForm
from knobwise.profiling.endpoint.reading import EndpointReply
from knobwise.profiling.endpoint.replies import Body, Read, Replies
from knobwise.profiling.endpoint.settings import LENGTHS, EndpointOptions
from knobwise.profiling.endpoint.token_counts import cut_at
from knobwise.profiling.measuring.questions import (
    Prompt,
    VQAData,
    VQAItem,
    most_common,
    prompts_of,
    soft_accuracy,
)

ONE_TOKEN = "A"
"""A text that is one token in any vocabulary."""


class _Chances(NamedTuple):
    """How a model takes to a query's right answers after demonstrations."""

    log_prob: float
    """ln P of the most common right answer."""
    likeliest: float
    """ln P of the likeliest tokens in its place."""
    accuracy: float = 0.0
    """The soft VQA accuracy of what greedy decoding gives."""
    correct: float = 0.0


class EndpointScorer:
    """How well a model behind an endpoint answers queries after demonstrations: a `Scorer`.

    If the server tells of the tokens of a prompt (`PROMPT`), a call gives what `TextScorer` gives
    for a language model that runs here: the demonstrations and the query are sent with each right
    answer as the end of the prompt. Which of its tokens are the answer's is found by prompts
    without demonstrations, with and without the answer.

    A server that tells only of the likeliest next tokens (`NEXT`) is asked for its answer, and
    right answers must be of one token; whether they are is seen by the tokens that the server
    counts. Then `logprob_score` is ln P of that token, without the end of the answer, and the most
    that it can be where the answer is not among the `LIKELIEST`. An answer is right
    (`vqa_correct`) if the first two tokens, or the only one, are a reference answer.

    Close it at the end.

    Args:
        client: the server.
        model: the name by which the server knows the model.
        data: the queries, and the bank of their demonstrations.
        options: how the server is asked.
        chats: False for plain text instead of the turns of a chat; this needs `PROMPT`.

    Attributes:
        gives: which of the two the server gives, `PROMPT` or `NEXT`.
        unlisted: how many scores are of an answer that was not among the `LIKELIEST`.
        cut_at: at how many tokens the server seems to cut prompts, so that the first demonstrations
            are missing; None where nothing shows it. With `PROMPT` an answer at the end shows that
            all was read.

    Raises:
        InputError: the server gives neither; it refuses a request, or keeps failing; a right answer
            of several tokens where it gives `NEXT`; the limit of money is reached.
    """

    def __init__(
        self,
        client: PaidClient,
        model: str,
        data: VQAData,
        options: EndpointOptions,
        chats: bool = True,
    ) -> None:
        self.data = data
        self.unlisted = 0
        self._lengths: list[tuple[int, float]] = []
        self._form: PromptForm = ChatForm() if chats else PlainForm()
        self._extra = dict(options.extra_body or {})
        self._model = model
        self._replies = Replies(client, options.concurrency)
        # the tokens of right answers, up to and with their end
        self._answers: dict[tuple[str, str], list[int]] = {}
        # the tokens that the server puts after an answer, of which the first ends it
        self._after: list[int] | None = None
        self.gives = self._detect(chats)
        if self.gives == NEXT:
            self._refuse_long_answers()

    @classmethod
    def load(
        cls, model: str, data: VQAData, options: EndpointOptions, chats: bool = True
    ) -> EndpointScorer:
        """Connect to a server, and see what it gives; arguments and errors as for the class."""
        client = PaidClient(options, [{"model": model}])
        try:
            return cls(client, model, data, options, chats)
        except BaseException:
            client.close()
            raise

    @property
    def identity(self) -> dict[str, object]:
        """What scores depend on besides the model: a folder goes on only with the same."""
        return {
            "endpoint": self._replies.client.url,
            "extra_body": self._extra,
            "log_probabilities": self.gives,
        }

    @property
    def cut_at(self) -> int | None:
        """See the class."""
        return cut_at(*zip(*self._lengths, strict=True)) if self._lengths else None

    def keep(self, folder: Path) -> None:
        """Keep what the server says in this folder, and take what an earlier run kept there."""
        self._replies.keep(folder)

    def close(self) -> None:
        """Close the connections."""
        self._replies.close()

    def vote(self, queries: Tensor, demonstrations: Tensor) -> Tensor:
        """As in `Scorer`."""
        return self.data.vote(queries, demonstrations)

    def __call__(self, queries: Tensor, demonstrations: Tensor) -> dict[str, Tensor]:
        prompts = prompts_of(queries, demonstrations)
        score = self._by_prompt if self.gives == PROMPT else self._by_next
        columns = torch.tensor(score(prompts)).reshape(len(prompts), len(_Chances._fields))
        right, likeliest, accuracy, correct = columns.T
        return {
            "logprob_score": right,
            "vqa_gt_prob": right.exp(),
            "vqa_acc_score": accuracy,
            "vqa_correct": correct,
            "vqa_rel_score": (right - likeliest).exp(),
        }

    # -- answers of any length ---------------------------------------------------------------------

    def _by_prompt(self, prompts: Sequence[Prompt]) -> list[_Chances]:
        """Score by the tokens of prompts that end with the answers."""
        bodies = []
        items = [self.data.queries[query] for query, _ in prompts]
        self._find_answers(items)
        for item, (_, rows) in zip(items, prompts, strict=True):
            for answer in most_common(item.answers):
                bodies.append(self._prompt(self._form.answered(self._shots(rows), item, answer)))
        replies = iter(self._replies(bodies, self._end_of_prompt))
        chances = []
        for item in items:
            # the most common right answer comes first
            rows_of_item = []
            for answer in most_common(item.answers):
                tokens = self._answer_in(next(replies), item, answer)
                log_prob = sum(token.log_prob for token in tokens)
                greedy = all(token.log_prob == token.likeliest for token in tokens)
                accuracy = greedy * soft_accuracy(answer, item.answers)
                likeliest = sum(token.likeliest for token in tokens)
                rows_of_item.append(_Chances(log_prob, likeliest, accuracy, float(greedy)))
            best = max(row.accuracy for row in rows_of_item)
            correct = max(row.correct for row in rows_of_item)
            chances.append(rows_of_item[0]._replace(accuracy=best, correct=correct))
        return chances

    def _find_answers(self, items: Sequence[VQAItem]) -> None:
        """Find the tokens of right answers: what a prompt without demonstrations has more than the
        same prompt up to where the answer begins."""
        new = []
        for item in {item.id: item for item in items}.values():
            for answer in most_common(item.answers):
                if (item.id, answer) not in self._answers:
                    new.append((item, answer))
        if not new:
            return
        form = self._form
        if self._after is None:
            item, answer = new[0]
            self._after = self._following(item, answer)
        bodies = []
        for item, answer in new:
            bodies.append(self._prompt(form.before((), item)))
            bodies.append(self._prompt(form.answered((), item, answer)))
        replies = iter(self._replies(bodies, _whole_prompt))
        for item, answer in new:
            before = _numbers(next(replies))
            whole = _numbers(next(replies))
            # what follows the end is never written by the model
            end = len(whole) - max(len(self._after) - 1, 0)
            tokens = whole[len(before) : end]
            if whole[: len(before)] != before or not tokens:
                raise self._unclear(item)
            self._answers[item.id, answer] = tokens

    def _following(self, item: VQAItem, answer: str) -> list[int]:
        """Return the tokens that the server puts after an answer."""
        forms = [self._form.answered((), item, answer, goes_on) for goes_on in (True, False)]
        replies = self._replies(map(self._prompt, forms), _whole_prompt)
        unended, ended = map(_numbers, replies)
        if ended[: len(unended)] != unended:
            raise self._unclear(item)
        return ended[len(unended) :]

    def _answer_in(
        self, replies: Sequence[Sequence[Any]], item: VQAItem, answer: str
    ) -> list[PromptToken]:
        """Return the tokens of an answer at the end of a prompt."""
        wanted = self._answers[item.id, answer]
        end = len(replies) - max(len(self._after or ()) - 1, 0)
        tokens = [PromptToken(*token) for token in replies[end - len(wanted) : end]]
        if [token.number for token in tokens] != wanted:
            raise self._unclear(item)
        return tokens

    def _unclear(self, item: VQAItem) -> InputError:
        return InputError(
            f"query {item.id!r}: where its answer begins and ends cannot be told from the tokens "
            f"that {self._replies.client.url} gives of a prompt; try vlm.chats=false"
        )

    def _prompt(self, fields: Fields) -> Body:
        """Return a request whose prompt is to be told of."""
        options = {**fields.get("extra_body", {}), PROMPT: 1}
        return self._body({**fields, "extra_body": options}, 1)

    def _end_of_prompt(self, reply: EndpointReply) -> list[Any]:
        """Read as many of a prompt's last tokens as the longest answer may need."""
        longest = max(map(len, self._answers.values()))
        return _whole_prompt(reply)[-longest - len(self._after or ()) :]

    # -- answers of one token ----------------------------------------------------------------------

    def _by_next(self, prompts: Sequence[Prompt]) -> list[_Chances]:
        """Score by the likeliest first tokens."""
        items = [self.data.queries[query] for query, _ in prompts]
        bodies = []
        for item, (_, rows) in zip(items, prompts, strict=True):
            bodies.append(self._next(self._form.before(self._shots(rows), item)))
        chances = []
        replies = self._replies(bodies, _beginning)
        for item, body, (text, tokens, *count) in zip(items, bodies, replies, strict=True):
            # what was kept by an older version has no count
            letters = sum(len(str(turn["content"])) for turn in body["messages"])
            read = count[0] if count else None
            self._lengths.append((letters, math.nan if read is None else read))
            right = token_chance(item.answer, tokens)
            self.unlisted += not right.listed
            accuracy = soft_accuracy(text, item.answers)
            chances.append(_Chances(right.log_prob, right.likeliest, accuracy, float(accuracy > 0)))
        return chances

    def _next(self, fields: Fields) -> Body:
        """Return a request for the first tokens of an answer."""
        # the second one tells whether the answer is longer than the first
        return self._body({**fields, "logprobs": True, NEXT: LIKELIEST}, 2)

    def _refuse_long_answers(self) -> None:
        """Raise InputError for a right answer of several tokens."""
        by_answer = {item.answer: item for item in self.data.queries}
        bodies = []
        for text in (ONE_TOKEN, *by_answer):
            bodies.append(self._body({"messages": [{"role": "user", "content": text}]}, 1))
        least, *counts = self._replies(bodies, _tokens_read)
        for (answer, item), count in zip(by_answer.items(), counts, strict=True):
            if count > least:
                raise InputError(
                    f"query {item.id!r}: the answer {answer!r} is {count - least + 1} tokens long; "
                    f"{self._replies.client.url} gives {NEXT}, which tell of one token, not "
                    f"the {PROMPT} of vLLM, which tell of any answer"
                )

    # -- requests ----------------------------------------------------------------------------------

    def _detect(self, chats: bool) -> str:
        """Return what the server gives. Raises InputError if it gives nothing of use, or fails."""
        fields = self._form.before((), self.data.queries[0])
        ways: list[tuple[str, Body, Read]] = [(PROMPT, self._prompt(fields), _whole_prompt)]
        if chats:
            ways.append((NEXT, self._next(fields), _beginning))
        for name, body, read in ways:
            try:
                self._replies([body], read)
                return name
            except Declined:
                # some servers refuse fields that they do not know; one that fails, as while it
                # loads, has not said that it does
                continue
        # a model that does not exist, or a limit of money, is said here
        self._replies([self._body(fields, 1)], _text)
        names = " nor ".join(name for name, *_ in ways)
        raise InputError(
            f"endpoint={self._replies.client.url}: gives no log-probabilities of a given answer "
            f"(no {names}), so demonstrations cannot be scored there; vLLM gives them"
        )

    def _body(self, fields: Fields, max_tokens: int) -> Body:
        """Return a request."""
        body = {"model": self._model, "temperature": 0, **fields}
        if not {*self._extra}.intersection(LENGTHS):
            body["max_tokens"] = max_tokens
        return body | {"extra_body": {**fields.get("extra_body", {}), **self._extra}}

    def _shots(self, rows: Sequence[int]) -> list[VQAItem]:
        return [self.data.bank[row] for row in rows]


def _numbers(tokens: Iterable[Sequence[Any]]) -> list[int]:
    return [int(number) for number, *_ in tokens]


def _whole_prompt(reply: EndpointReply) -> list[Any]:
    """Read the tokens of a prompt, as lists, since they go into a file."""
    tokens = prompt_tokens(reply.content)
    if tokens is None:
        raise ValueError(f"gives no {PROMPT}")
    return [[*token] for token in tokens]


def _beginning(reply: EndpointReply) -> tuple[str, list[tuple[str, float]], int | None]:
    """Read the first tokens of an answer, what could stand in place of the first, and the number of
    tokens of the prompt, None where the server does not count them."""
    tokens = next_tokens(reply.content)
    if tokens is None:
        raise ValueError(f"gives no {NEXT}")
    return reply.text, tokens, reply.tokens_in if reply.counted else None


def _text(reply: EndpointReply) -> str:
    """Read the text of an answer."""
    return reply.text


def _tokens_read(reply: EndpointReply) -> int:
    """Read how many tokens a prompt has."""
    if not reply.counted:
        raise ValueError(f"counts no tokens, so whether {NEXT} tell of an answer cannot be told")
    return reply.tokens_in
