"""A LiteLLM proxy between the client of OpenAI and knobwise. Whatever another client asks it for,
chat goes on."""

from cases import MODEL, case
from gateway import (
    answered_after,
    chat,
    client,
    responded,
    seen_of_chat,
    streamed,
)


@case("chat, header `x-budget-ms`")
def header(question, budget_ms):
    return seen_of_chat(chat(question, budget_ms))


@case("chat, `extra_body`")
def body(question, budget_ms):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        extra_body={"budget_ms": budget_ms},
    )
    return seen_of_chat(raw)


@case("stream")
def stream(question, budget_ms):
    return streamed(question, budget_ms)[0]


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    return streamed(question, budget_ms, stream_options={"include_usage": True})[0]


@case("three chats after embeddings")
def after_embeddings(question, budget_ms):
    def ask():
        client.embeddings.create(model=MODEL, input="a text", encoding_format="float")

    return answered_after(ask, question, budget_ms)


@case("three chats after `/v1/responses`")
def after_responses(question, budget_ms):
    def ask():
        client.responses.create(model=MODEL, input="What is 1 + 1?")

    return answered_after(ask, question, budget_ms)


@case("three chats after images, which the endpoint lacks")
def after_images(question, budget_ms):
    def ask():
        client.images.generate(model=MODEL, prompt="a house")

    return answered_after(ask, question, budget_ms)


@case("three chats after moderations, which the endpoint lacks")
def after_moderations(question, budget_ms):
    def ask():
        client.moderations.create(model=MODEL, input="a text")

    return answered_after(ask, question, budget_ms)


@case("three chats after a request that knobwise refuses")
def after_refusal(question, budget_ms):
    def ask():
        chat("What is 1 + 1?", "soon")

    return answered_after(ask, question, budget_ms)


@case("three chats after a request that the endpoint refuses")
def after_bad_request(question, budget_ms):
    def ask():
        chat("What is 1 + 1?", budget_ms, extra_body={"logprobs": True, "refuse": True})

    return answered_after(ask, question, budget_ms)


@case("embeddings", decides=False)
def embeddings(question, _):
    answer = client.embeddings.create(model=MODEL, input=question, encoding_format="float")
    return {"text": str(answer.data[0].embedding)}


@case("`/v1/responses`, header `x-budget-ms`")
def respond(question, budget_ms):
    return responded(question, budget_ms)
