"""The model for OpenAI servers of smolagents."""

from cases import KEY, MODEL, URL, case, watched
from openai import DefaultHttpxClient
from smolagents import ChatMessage, OpenAIModel
from smolagents.models import agglomerate_stream_deltas


def model(**options):
    return OpenAIModel(model_id=MODEL, api_base=URL, api_key=KEY, **options)


def messages(question):
    return [ChatMessage(role="user", content=[{"type": "text", "text": question}])]


def seen(message):
    raw = message.raw
    usage = message.token_usage
    return {
        "text": message.content,
        "model": getattr(raw, "model", None),
        # the headers are not to be had
        "request_id": None,
        "answer_id": getattr(raw, "id", None),
        "usage": bool(usage and usage.output_tokens),
    }


@case("chat, `extra_body`")
def plain(question, budget_ms):
    return seen(model(extra_body={"budget_ms": budget_ms}).generate(messages(question)))


@case("chat, `client_kwargs`")
def header(question, budget_ms):
    headers = {"default_headers": {"x-budget-ms": str(budget_ms)}}
    return seen(model(client_kwargs=headers).generate(messages(question)))


@case("chat, `generate(…, extra_body=…)`")
def of_a_call(question, budget_ms):
    return seen(model().generate(messages(question), extra_body={"budget_ms": budget_ms}))


@case("chat, an HTTP client with a hook")
def hook(question, budget_ms):
    watch = watched(DefaultHttpxClient)
    asks = model(client_kwargs={"http_client": watch.client}, extra_body={"budget_ms": budget_ms})
    return seen(asks.generate(messages(question))) | watch.seen


@case("stream")
def streamed(question, budget_ms):
    deltas = list(model(extra_body={"budget_ms": budget_ms}).generate_stream(messages(question)))
    return seen(agglomerate_stream_deltas(deltas))
