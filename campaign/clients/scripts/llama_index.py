"""OpenAILike of llama-index, whose default is /v1/completions."""

from cases import KEY, MODEL, URL, case, watched
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from openai import DefaultHttpxClient

usual = {"model": MODEL, "api_base": URL, "api_key": KEY, "max_retries": 0}


def asked(question, **options):
    return OpenAILike(**usual, **options).chat([ChatMessage(role="user", content=question)])


def seen(answer, text=None):
    raw = answer.raw
    return {
        "text": text or answer.message.content,
        "model": raw.model,
        # the headers are not to be had
        "request_id": None,
        "answer_id": raw.id,
        "usage": bool(raw.usage),
    }


@case("chat, `additional_kwargs`")
def plain(question, budget_ms):
    extra = {"extra_body": {"budget_ms": budget_ms}}
    return seen(asked(question, is_chat_model=True, additional_kwargs=extra))


@case("chat, `default_headers`")
def header(question, budget_ms):
    headers = {"x-budget-ms": str(budget_ms)}
    return seen(asked(question, is_chat_model=True, default_headers=headers))


@case("chat, an HTTP client with a hook")
def hook(question, budget_ms):
    watch = watched(DefaultHttpxClient)
    extra = {"extra_body": {"budget_ms": budget_ms}}
    options = {"additional_kwargs": extra, "http_client": watch.client}
    return seen(asked(question, is_chat_model=True, **options)) | watch.seen


def streamed(question, **extra):
    llm = OpenAILike(**usual, is_chat_model=True, additional_kwargs=extra)
    *_, last = llm.stream_chat([ChatMessage(role="user", content=question)])
    return seen(last)


@case("stream")
def stream(question, budget_ms):
    return streamed(question, extra_body={"budget_ms": budget_ms})


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    options = {"include_usage": True}
    return streamed(question, extra_body={"budget_ms": budget_ms}, stream_options=options)


@case("its default, `/v1/completions`", question="Question: What is {} + 12?", decides=False)
def default(question, _):
    answer = OpenAILike(**usual | {"model": "small"}).complete(question, formatted=True)
    return {"text": answer.text}
