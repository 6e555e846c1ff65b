"""What the scripts share that ask a LiteLLM proxy in front of knobwise, by the client of OpenAI."""

import time

import openai
from cases import KEY, MODEL, URL

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
OURS = "llm_provider-x-knobwise-"
"""How our headers come back through LiteLLM."""
DEAD_S = 20
"""LiteLLM leaves a server alone for five seconds that it takes for dead."""


def chat(question, budget_ms, **options):
    return client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        extra_headers={"x-budget-ms": str(budget_ms)},
        **options,
    )


def seen(answer, text, headers):
    request_id, knobs = headers.get(f"{OURS}request-id"), headers.get(f"{OURS}knobs")
    about = {"request_id": request_id, "knobs": knobs, "answer_id": answer.id}
    return {"text": text, "model": answer.model, "usage": bool(answer.usage), **about}


def seen_of_chat(raw):
    answer = raw.parse()
    return seen(answer, answer.choices[0].message.content, raw.headers)


def streamed(question, budget_ms, **options):
    """What came back of a stream, and whether it came to its end."""
    raw = chat(question, budget_ms, stream=True, **options)
    chunks = list(raw.parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ended = any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
    usage = any(chunk.usage for chunk in chunks)
    return {**seen(chunks[-1], text, raw.headers), "usage": usage}, ended


def responded(question, budget_ms, **options):
    headers = {"x-budget-ms": str(budget_ms)}
    raw = client.responses.with_raw_response.create(
        model=MODEL, input=question, extra_headers=headers, **options
    )
    answer = raw.parse()
    return seen(answer, answer.output_text, raw.headers)


def answered_after(ask, question, budget_ms):
    """Three chats right after another request, whatever comes of that; what the last one saw."""
    last = time.monotonic() + DEAD_S
    while True:
        try:
            chat("What is 1 + 1?", budget_ms)
            break
        except openai.RateLimitError:
            # of the case before
            if time.monotonic() > last:
                raise
            time.sleep(0.5)
    try:
        ask()
        came = "was answered"
    except openai.APIStatusError as error:
        came = f"had status {error.status_code}"
    # equal ones would get answers of one id from the simulated endpoint
    for text in ("What is 2 + 2?", "What is 3 + 3?", question):
        answer = seen_of_chat(chat(text, budget_ms))
    return {**answer, "note": f"that {came}; then text"}
