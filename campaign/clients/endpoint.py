"""The simulated endpoint with the rest of what clients ask for: calls of tools, /v1/responses and
/v1/embeddings. It keeps what it was sent."""

import hashlib
import json
import re
from contextlib import contextmanager
from typing import NamedTuple

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from knobwise.testbeds.simulated_endpoint import (
    CREATED,
    EndpointState,
    SimulatedEndpoint,
    problem,
)
from knobwise.testbeds.simulated_models import MODELS, Simulation, reply_to

TOOL_WORD = "tool"
"""A question with this word is answered by a call of the first tool."""


class Received(NamedTuple):
    """A request as it came."""

    path: str
    headers: dict
    body: dict


class FullState(EndpointState):
    """The routes, and what came.

    Args:
        responds: False for an endpoint without /v1/responses.

    Attributes:
        received: every request.
    """

    def __init__(self, responds=True):
        super().__init__(delay=0)
        self.received = []
        self._responds = responds

    def application(self):
        application = super().application()
        further = {"embeddings": self.embed}
        if self._responds:
            further["responses"] = self.respond
        for path, function in further.items():
            application.router.routes.append(Route(f"/v1/{path}", function, methods=["POST"]))
        return application

    async def _read(self, request):
        body = json.loads(await request.body())
        self.received.append(Received(request.url.path, dict(request.headers), body))
        return body

    async def complete(self, request):
        body = await self._read(request)
        if body.get("refuse"):
            return problem(400, "refuse: is no field")
        if not calls_tool(body, body.get("messages", ())):
            return await super().complete(request)
        function = body["tools"][0]["function"]
        head = {"id": f"chatcmpl-{len(self.received)}", "created": CREATED, "model": body["model"]}
        arguments = json.dumps(values_for(function["parameters"]))
        call = {"id": f"call_{len(self.received)}", "type": "function"}
        call["function"] = {"name": function["name"], "arguments": arguments}
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "finish_reason": "tool_calls"}
        if not body.get("stream"):
            whole = {**head, "object": "chat.completion", "usage": usage}
            return JSONResponse({**whole, "choices": [{**choice, "message": message}]})
        call["index"] = 0
        head["object"] = "chat.completion.chunk"
        first = {"index": 0, "delta": message, "finish_reason": None}
        chunks = [{**head, "choices": [first]}, {**head, "choices": [{**choice, "delta": {}}]}]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage})
        return events([*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"])

    async def respond(self, request):
        """Answer at /v1/responses."""
        body = await self._read(request)
        if body["model"] not in MODELS:
            return problem(404, f"The model {body['model']!r} does not exist")
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = [with_text(item) for item in items if item.get("type", "message") == "message"]
        chat = {"messages": messages, "max_tokens": body.get("max_output_tokens")}
        chat["reasoning_effort"] = (body.get("reasoning") or {}).get("effort")
        reply = reply_to(chat, body["model"], Simulation(), 0)
        self.requests.append(body)
        number = len(self.received)
        if calls_tool(body, items):
            tool = body["tools"][0]
            arguments = json.dumps(values_for(tool["parameters"]))
            call = {"name": tool["name"], "arguments": arguments, "call_id": f"call_{number}"}
            item = {"id": f"fc_{number}", "type": "function_call", "status": "completed", **call}
        else:
            text = {"type": "output_text", "text": " ".join(reply.words), "annotations": []}
            about = {"type": "message", "role": "assistant", "status": "completed"}
            item = {"id": f"msg_{number}", **about, "content": [{**text, "logprobs": []}]}
        usage = reply.usage()
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        }
        counts["total_tokens"] = usage["total_tokens"]
        counts["input_tokens_details"] = {"cached_tokens": 0}
        counts["output_tokens_details"] = usage["completion_tokens_details"]
        whole = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": CREATED,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": {},
            "model": body["model"],
            "output": [item],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "top_p": 1.0,
            "usage": counts,
        }
        if not body.get("stream"):
            return JSONResponse(whole)
        return events(
            f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': place})}\n\n"
            for place, event in enumerate(response_events(whole, item))
        )

    async def embed(self, request):
        """Answer at /v1/embeddings, with two numbers that follow from the text."""
        body = await self._read(request)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = []
        for index, text in enumerate(texts):
            numbers = hashlib.sha256(str(text).encode()).digest()[:2]
            vector = [number / 255 for number in numbers]
            data.append({"object": "embedding", "index": index, "embedding": vector})
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        whole = {"object": "list", "data": data, "model": body["model"], "usage": usage}
        return JSONResponse(whole)


def calls_tool(body, turns):
    """Whether a request is answered by a call: it forces one, or the question, which is the last
    turn, speaks of a tool."""
    if not body.get("tools"):
        return False
    if body.get("tool_choice") not in (None, "auto", "none"):
        return True
    return turns[-1].get("role") == "user" and TOOL_WORD in json.dumps(turns[-1]["content"])


def values_for(schema):
    """Return arguments that fit a schema."""
    usual = {"string": "42", "integer": 42, "number": 42, "boolean": True}
    properties = schema.get("properties", {})
    return {name: usual[properties[name]["type"]] for name in schema.get("required", ())}


def with_text(item):
    """Return an item of the input as a message of a chat."""
    content = item["content"]
    if not isinstance(content, str):
        content = [{"type": "text", "text": part.get("text", "")} for part in content]
    return {"role": item["role"], "content": content}


def response_events(whole, item):
    """Yield the events of an answer at /v1/responses, but for their numbers."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    place = {"output_index": 0, "item_id": item["id"]}
    opened = {**item, "status": "in_progress"}
    if item["type"] == "message":
        (part,) = item["content"]
        place["content_index"] = 0
        added = {"type": "response.output_item.added", "output_index": 0}
        yield {**added, "item": {**opened, "content": []}}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        for text in re.findall(r"\S+\s*", part["text"]):
            delta = {"type": "response.output_text.delta", **place, "logprobs": []}
            yield {**delta, "delta": text}
        ended = {"type": "response.output_text.done", **place, "logprobs": []}
        yield {**ended, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "part": part}
    else:
        added = {"type": "response.output_item.added", "output_index": 0}
        yield {**added, "item": {**opened, "arguments": ""}}
        named = {**place, "name": item["name"]}
        delta = {"type": "response.function_call_arguments.delta", **place}
        yield {**delta, "delta": item["arguments"]}
        ended = {"type": "response.function_call_arguments.done", **named}
        yield {**ended, "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": whole}


def events(lines) -> Response:
    return StreamingResponse(iter(lines), media_type="text/event-stream")


@contextmanager
def full_endpoint(responds=True):
    """The server, whose `state` is a `FullState`."""
    with SimulatedEndpoint(state=FullState(responds)) as endpoint:
        yield endpoint
