"""A real server with tiny models behind knobwise, and a LiteLLM proxy in front."""

from concurrent.futures import ThreadPoolExecutor

import openai
from cases import MODEL, case
from gateway import answered_after, chat, client, responded, seen_of_chat, streamed

AT_ONCE = 4


@case("chat; knobwise adds `top_k`")
def plain(question, budget_ms):
    return seen_of_chat(chat(question, budget_ms))


@case("stream")
def stream(question, budget_ms):
    return streamed(question, budget_ms)[0]


@case("stream, `stream_options`")
def stream_with_usage(question, budget_ms):
    return streamed(question, budget_ms, stream_options={"include_usage": True})[0]


@case(f"{AT_ONCE} streams at once")
def streams(question, budget_ms):
    def ask(_):
        try:
            answer, ended = streamed(question, budget_ms)
            return bool(answer["text"] and ended)
        except (openai.APIError, IndexError):
            return False

    with ThreadPoolExecutor(AT_ONCE) as pool:
        whole = sum(pool.map(ask, range(AT_ONCE)))
    return {"text": "streams", "whole": whole, "note": f"{whole} of {AT_ONCE} whole"}


@case("a client's own `top_k`", decides=False)
def top_k(question, budget_ms):
    try:
        return seen_of_chat(chat(question, budget_ms, extra_body={"top_k": 20}))
    except openai.APIStatusError as error:
        return {"text": "refused", "note": f"status {error.status_code}"}


# transformers serve streams unless it is told not to
@case("`/v1/responses`, `stream=False`")
def respond(question, budget_ms):
    return responded(question, budget_ms, stream=False)


@case("three chats after `/v1/responses`")
def after_responses(question, budget_ms):
    def ask():
        client.responses.create(model=MODEL, input="What is 1 + 1?", stream=False)

    return answered_after(ask, question, budget_ms)


@case("three chats after embeddings")
def after_embeddings(question, budget_ms):
    def ask():
        client.embeddings.create(model=MODEL, input="a text", encoding_format="float")

    return answered_after(ask, question, budget_ms)
