"""The SDK of LiteLLM."""

import litellm
from cases import KEY, MODEL, URL, case

usual = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "num_retries": 0}
OURS = "llm_provider-x-knobwise-"


def asked(question, **options):
    messages = [{"role": "user", "content": question}]
    return litellm.completion(**usual, messages=messages, **options)


def seen(answer, text, usage):
    headers = answer._hidden_params.get("additional_headers") or {}
    knobs, request_id = headers.get(f"{OURS}knobs"), headers.get(f"{OURS}request-id")
    about = {"request_id": request_id, "knobs": knobs, "answer_id": answer.id}
    return {"text": text, "model": answer.model, "usage": bool(usage), **about}


@case("chat, `extra_body`")
def plain(question, budget_ms):
    answer = asked(question, extra_body={"budget_ms": budget_ms})
    return seen(answer, answer.choices[0].message.content, answer.usage)


@case("chat, `extra_headers`")
def header(question, budget_ms):
    answer = asked(question, extra_headers={"x-budget-ms": str(budget_ms)})
    return seen(answer, answer.choices[0].message.content, answer.usage)


@case("chat, `budget_ms=…`")
def beside(question, budget_ms):
    answer = asked(question, budget_ms=budget_ms)
    return seen(answer, answer.choices[0].message.content, answer.usage)


def streamed(question, **options):
    chunks = list(asked(question, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    usage = any(getattr(chunk, "usage", None) for chunk in chunks)
    return seen(chunks[-1], text, usage)


@case("stream")
def stream(question, budget_ms):
    return streamed(question, extra_body={"budget_ms": budget_ms})


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    options = {"stream_options": {"include_usage": True}, "extra_body": {"budget_ms": budget_ms}}
    return streamed(question, **options)


@case("`responses()`")
def respond(question, budget_ms):
    extra = {"budget_ms": budget_ms}
    answer = litellm.responses(**usual, input=question, extra_body=extra)
    text = answer.output[0].content[0].text
    return seen(answer, text, answer.usage)


@case("embeddings", decides=False)
def embeddings(question, _):
    model = {"model": "openai/small", "api_base": URL, "api_key": KEY}
    answer = litellm.embedding(**model, input=[question], encoding_format="float")
    return {"text": str(answer.data[0]["embedding"])}
