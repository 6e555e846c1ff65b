"""any-llm."""

import any_llm
from cases import KEY, MODEL, URL, case, watched
from openai import DefaultAsyncHttpxClient

usual = {"model": MODEL, "provider": "openai", "api_base": URL, "api_key": KEY}


def asked(question, **options):
    return any_llm.completion(**usual, messages=[{"role": "user", "content": question}], **options)


def seen(answer, text):
    about = {"model": answer.model, "answer_id": answer.id, "usage": bool(answer.usage)}
    # the headers are not to be had
    return {"text": text, "request_id": None, **about}


@case("chat, `extra_body`")
def plain(question, budget_ms):
    answer = asked(question, extra_body={"budget_ms": budget_ms})
    return seen(answer, answer.choices[0].message.content)


@case("chat, `extra_headers`")
def header(question, budget_ms):
    answer = asked(question, extra_headers={"x-budget-ms": str(budget_ms)})
    return seen(answer, answer.choices[0].message.content)


@case("chat, an HTTP client with a hook")
def hook(question, budget_ms):
    watch = watched(DefaultAsyncHttpxClient)
    extra = {"client_args": {"http_client": watch.client}, "extra_body": {"budget_ms": budget_ms}}
    answer = asked(question, **extra)
    return seen(answer, answer.choices[0].message.content) | watch.seen


def streamed(question, **options):
    chunks = list(asked(question, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return seen(chunks[-1], text)


@case("stream")
def stream(question, budget_ms):
    return streamed(question, extra_body={"budget_ms": budget_ms})


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    options = {"include_usage": True}
    return streamed(question, extra_body={"budget_ms": budget_ms}, stream_options=options)


@case("`responses()`")
def respond(question, budget_ms):
    extra = {"budget_ms": budget_ms}
    answer = any_llm.responses(**usual, input_data=question, extra_body=extra)
    return seen(answer, answer.output_text)
