"""The generator for chats of haystack, and the one for /v1/responses."""

from cases import KEY, MODEL, URL, case, shown
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret

usual = {"model": MODEL, "api_base_url": URL, "api_key": Secret.from_token(KEY)}


def seen(reply):
    about = reply.meta
    return {
        "text": reply.text,
        "model": about.get("model"),
        # the headers are not to be had
        "request_id": None,
        "answer_id": about.get("id"),
        "usage": bool(about.get("usage")),
    }


def asked(question, kind=OpenAIChatGenerator, **options):
    (reply,) = kind(**usual, **options).run([ChatMessage.from_user(question)])["replies"]
    return seen(reply)


@case("chat, `generation_kwargs`")
def plain(question, budget_ms):
    return asked(question, generation_kwargs={"extra_body": {"budget_ms": budget_ms}})


@case("chat, `extra_headers` in `generation_kwargs`")
def header(question, budget_ms):
    headers = {"x-budget-ms": str(budget_ms)}
    return asked(question, generation_kwargs={"extra_headers": headers})


@case("chat, an HTTP client with a hook")
def hook(question, budget_ms):
    seen_headers = {}

    def note(response):
        seen_headers.update(shown(response.headers))

    settings = {"extra_body": {"budget_ms": budget_ms}}
    hooks = {"event_hooks": {"response": [note]}}
    return asked(question, generation_kwargs=settings, http_client_kwargs=hooks) | seen_headers


@case("stream")
def stream(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return asked(question, streaming_callback=lambda chunk: None, generation_kwargs=settings)


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}, "stream_options": {"include_usage": True}}
    return asked(question, streaming_callback=lambda chunk: None, generation_kwargs=settings)


@case("`/v1/responses`, its generator")
def respond(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return asked(question, OpenAIResponsesChatGenerator, generation_kwargs=settings)
