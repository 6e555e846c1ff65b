"""One request: tried with other settings after faults, its answer passed back byte for byte.

    attempt ─▶ hold until the answer has begun ─▶ pass on ─▶ log before the last byte
       ▲                 │
       └─ next setting ◀─┘ a fault

Nothing is sent to the client before the endpoint's answer has begun, so that until then another
setting can take its place.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
from starlette.types import Scope, Send

from knobwise.common.errors import InputError
from knobwise.serving.proxy.attempt import Attempt, FaultyAnswer
from knobwise.serving.proxy.chat import ChatRequest, budget_header
from knobwise.serving.proxy.guards import refusal
from knobwise.serving.proxy.metrics import label_of
from knobwise.serving.proxy.upstream import FAULTS, Pairs
from knobwise.serving.proxy.walk import Choice

if TYPE_CHECKING:
    from knobwise.serving.proxy.proxy import ChatProxy

NO_RETRY = (b"x-should-retry", b"false")
"""What OpenAI's clients read where another attempt makes no sense."""


def fault_of(error: BaseException) -> str:
    """Return what happened in words."""
    if isinstance(error, FaultyAnswer):
        return f"answered with {error}"
    return f"raised {type(error).__name__}"


class Exchange:
    """One request and its answer.

    Attributes:
        ended: True once its outcome is counted.
        left: True if the client has left.
    """

    def __init__(
        self,
        proxy: ChatProxy,
        request: ChatRequest,
        choice: Choice | None,
        arrived: float,
        scope: Scope,
        path: str,
        send: Send,
    ) -> None:
        self._proxy = proxy
        self._walk = proxy.walk
        self._metrics = proxy.metrics
        self._request = request
        self._next = choice
        self._arrived = arrived
        self._scope = scope
        self._path = path
        self._send = send
        self._attempt: Attempt | None = None
        self._noted: Attempt | None = None
        self._gave_up = False
        self._settled = False
        self.ended = False
        self.left = False

    @property
    def _choice(self) -> Choice | None:
        """The setting that was sent last."""
        return self._next if self._attempt is None else self._attempt.choice

    async def run(self) -> None:
        """Send the request on, try other settings after faults, and pass the answer back."""
        self._metrics.overhead.observe(self._walk.runtime.now() - self._arrived)
        while True:
            attempt = Attempt(self._proxy, self._request, self._next, self._scope, self._path)
            self._attempt = attempt
            try:
                if await self._passed(attempt):
                    return
            finally:
                attempt.close()

    async def _passed(self, attempt: Attempt) -> bool:
        """Ask, and pass the answer back; return False if another setting is to be tried."""
        fault: Exception | None = None
        try:
            await attempt.ask()
        except InputError as error:
            # no setting makes it a request that the endpoint takes
            self.end("refused")
            await self._say(400, str(error))
            return True
        except FAULTS as error:
            fault = error
        else:
            fault = FaultyAnswer(attempt.fault) if attempt.fault else None
        if fault is not None and not (isinstance(fault, FaultyAnswer) and attempt.is_of_request):
            self._note(attempt, False)
        # nothing has been sent yet, so another answer can take its place
        if fault is not None and self._choice is not None:
            other = self._walk.again(self._choice)
            if other is not None:
                self._abandon("the endpoint", fault)
                self._next = other
                return False
            # a client's own attempts would only repeat those of here
            self._gave_up = self._choice.attempts > 1
        # the last of the settings that were tried has the word
        if fault is not None and not isinstance(fault, FaultyAnswer):
            await self._refuse(fault)
        elif attempt.is_stream:
            await self._pass_chunks(attempt)
        else:
            await self._pass_whole(attempt)
        return True

    # -- passing back ------------------------------------------------------------------------------

    async def _pass_whole(self, attempt: Attempt) -> None:
        """Log a whole answer, then pass it back."""
        attempt.began = self._walk.runtime.now()
        # errors took no time that tells anything about an answer
        if attempt.is_answer:
            await self._finish(attempt)
        else:
            fault = attempt.fault or f"status {attempt.status}"
            await self._fail("endpoint_error", FaultyAnswer(fault))
        await self._begin(attempt.status, attempt.headers)
        await self._send({"type": "http.response.body", "body": attempt.content})

    async def _pass_chunks(self, attempt: Attempt) -> None:
        """Pass chunks back as they come. The row is in the log before the last of them is sent, so
        that whoever has a whole answer finds it there."""
        await self._begin(attempt.status, attempt.headers)
        try:
            async for content in attempt.chunks():
                if attempt.reader.closed:
                    await self._finish(attempt)
                # waits where the client reads more slowly than the endpoint writes
                if content:
                    message = {"type": "http.response.body", "body": content, "more_body": True}
                    await self._send(message)
        except FAULTS as error:
            # without an end, the server closes the connection, so the client sees the cut too
            await self._finish(attempt, error)
            return
        # not every server sends a last event
        await self._finish(attempt)
        await self._send({"type": "http.response.body", "body": b""})

    async def _refuse(self, fault: Exception) -> None:
        """Say that the endpoint gave no answer."""
        await self._fail("endpoint_error", fault)
        status = 504 if isinstance(fault, TimeoutError) else 502
        await self._say(status, f"the endpoint gave no whole answer ({type(fault).__name__})")

    async def _say(self, status: int, message: str) -> None:
        """Send an error of our own."""
        response = refusal(status, message)
        await self._begin(status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": response.body})

    async def _begin(self, status: int, headers: Pairs) -> None:
        """Send status and headers, with what was chosen."""
        if self._gave_up:
            headers = [pair for pair in headers if pair[0] != NO_RETRY[0]] + [NO_RETRY]
        headers = [*headers, *self._chosen()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _chosen(self) -> Pairs:
        """Return what was chosen, as headers."""
        if self._choice is None:
            return [(b"x-knobwise-unchanged", b"true")]
        decision = self._choice.decision
        log_fields = decision.request.log_fields or {}
        budget = budget_header(decision.request.controller.unit).removeprefix("x-")
        chosen = {
            "request-id": log_fields["id"],
            "knobs": label_of(self._choice.knobs),
            "reason": self._choice.reason,
            "fell-back": str(decision.fell_back).lower(),
            budget: f"{decision.request.budget_ms:g}",
            "attempts": str(self._choice.attempts),
        }
        if decision.promised is not None:
            chosen["promised"] = f"{decision.promised.share:g}"
        if decision.unlike:
            chosen["unlike"] = "true"
        if decision.limits_note:
            chosen["limits-note"] = decision.limits_note
        if "shadow" in log_fields:
            chosen["shadow"] = label_of(log_fields["shadow"])
        return [(f"x-knobwise-{name}".encode(), text.encode()) for name, text in chosen.items()]

    # -- ending ------------------------------------------------------------------------------------

    async def _finish(self, attempt: Attempt, error: Exception | None = None) -> None:
        """Log an answer that is whole, once; or count it as none.

        Args:
            error: what broke it off.
        """
        if self.ended:
            return
        reader = attempt.reader
        whole = self._choice is None or reader.is_whole
        self._note(attempt, whole and error is None and not attempt.fault)
        if attempt.fault:
            await self._fail("endpoint_error", FaultyAnswer(attempt.fault))
            return
        if self._choice is None and error is None:
            self.end("unchanged", began=attempt.began)
            self._walk.count_usd(attempt.usd())
            return
        if self._choice is None or not whole:
            fault = error or FaultyAnswer("a stream that does not say why it ended")
            await self._fail("cut", fault)
            return
        now = self._walk.runtime.now()
        self.end("answered", began=attempt.began)
        self._metrics.choices.labels(label_of(self._choice.decision.configuration)).inc()
        ended = attempt.began if self._proxy.first_counts else now
        choice = self._choice
        if self._proxy.first_counts:
            learns = attempt.is_stream
        else:
            fields = self._walk.fields
            learns = fields.is_measured(choice.body, reader.is_cut, reader.tokens)
        if not learns:
            choice = choice.unlearned()
        # a disk may take its time for a row, which other streams do not wait for
        await asyncio.to_thread(self._walk.finish, choice, ended, attempt.usd(), reader.answer_id)
        # whoever has its last byte was not broken off
        self.settle()

    def _note(self, attempt: Attempt, good: bool) -> None:
        """Note how the endpoint answered an attempt, once."""
        if attempt is not self._noted:
            self._noted = attempt
            self._proxy.answers.add(good)

    def settle(self) -> None:
        """Count the request as under way no longer, once."""
        if not self._settled:
            self._settled = True
            self._proxy.under_way.add(-1)

    async def _fail(self, outcome: str, error: Exception) -> None:
        """Count a request that got no answer, and log it, once."""
        if self.ended:
            return
        self.end(outcome, error)
        if self._choice is not None:
            await asyncio.to_thread(self._walk.lose, self._choice, fault_of(error))

    def end(
        self, outcome: str, error: BaseException | None = None, began: float | None = None
    ) -> None:
        """Count how the request ended, once; where an error ended it, nothing is learned but that
        an answer takes longer.

        Args:
            began: when the answer had its first content.
        """
        if self.ended:
            return
        self.ended = True
        self._metrics.requests.labels(outcome).inc()
        if outcome == "refused":
            return
        if error is not None:
            who = "the client" if outcome == "client_left" else "the endpoint"
            self._abandon(who, error)
            return
        now = self._walk.runtime.now()
        self._metrics.answer.observe(now - self._arrived)
        if began is not None:
            self._metrics.first.observe(began - self._arrived)

    async def leave(self) -> None:
        """Count a request whose client has left, and log it, once."""
        if self.ended:
            return
        attempt = self._attempt
        if attempt is not None and attempt.choice is not None and self._is_timed:
            # what counts had come in time or not, though the rest was for nobody
            self.ended = True
            self._metrics.requests.labels("client_left").inc()
            answer_id = attempt.reader.answer_id
            finish = self._walk.finish
            await asyncio.to_thread(finish, attempt.choice, attempt.began, answer_id=answer_id)
            return
        self.end("client_left", ConnectionResetError())
        if self._choice is not None and self._choice.learns and self._is_awaited:
            await asyncio.to_thread(self._walk.give_up, self._choice)

    def _abandon(self, who: str, error: BaseException) -> None:
        """Count that the present setting gave no answer."""
        overdue = self.left or isinstance(error, aiohttp.SocketTimeoutError)
        self._walk.abandon(self._choice, who, fault_of(error), overdue and self._is_awaited)

    @property
    def _is_timed(self) -> bool:
        """True if what is timed has come, where it is the first content of a stream."""
        attempt = self._attempt
        if attempt is None or not (self._proxy.first_counts and attempt.is_stream):
            return False
        return attempt.began is not None and attempt.is_answer

    @property
    def _is_awaited(self) -> bool:
        """True if what is timed is still to come, as far as can be seen from here, and is no answer
        that may take longer because the client wants longer ones than were measured."""
        if not self._proxy.first_counts:
            choice = self._choice
            return choice is None or not self._walk.fields.may_be_longer(choice.body)
        # of an answer that is no stream nobody sees when it begins
        begun = self._attempt is not None and self._attempt.began is not None
        return bool(self._request.chat.get("stream")) and not begun
