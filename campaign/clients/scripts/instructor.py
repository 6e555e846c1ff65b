"""Instructor, around the client of OpenAI."""

import instructor
import openai
from cases import KEY, MODEL, URL, case, watched
from pydantic import BaseModel

watch = watched(openai.DefaultHttpxClient)
asks = openai.OpenAI(base_url=URL, api_key=KEY, http_client=watch.client)
client = instructor.from_openai(asks)


class Number(BaseModel):
    number: int


def seen(result, raw):
    about = {"model": raw.model, "answer_id": raw.id, "usage": bool(raw.usage)}
    # the headers are to be had from the client below alone
    return {"text": str(result.number), **watch.seen, **about}


def asked(question, **options):
    return client.chat.completions.create_with_completion(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        response_model=Number,
        max_retries=0,
        **options,
    )


@case("chat, `extra_body`, an HTTP client with a hook")
def plain(question, budget_ms):
    return seen(*asked(question, extra_body={"budget_ms": budget_ms}))


@case("chat, `extra_headers`, the same client")
def header(question, budget_ms):
    return seen(*asked(question, extra_headers={"x-budget-ms": str(budget_ms)}))


@case("stream of parts")
def streamed(question, budget_ms):
    parts = client.chat.completions.create_partial(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        response_model=Number,
        max_retries=0,
        extra_body={"budget_ms": budget_ms},
    )
    *_, last = parts
    return {"text": str(last.number)}
