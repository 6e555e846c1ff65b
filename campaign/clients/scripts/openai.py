"""The client of OpenAI."""

import openai
from cases import MODEL, URL, case, shown

client = openai.OpenAI(base_url=URL, api_key="none")


def seen(answer, text, headers):
    about = {"model": answer.model, "answer_id": answer.id, "usage": bool(answer.usage)}
    return {"text": text, **about, **shown(headers)}


@case("chat, `extra_body`")
def plain(question, budget_ms):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        extra_body={"budget_ms": budget_ms},
    )
    answer = raw.parse()
    text = answer.choices[0].message.content
    return seen(answer, text, raw.headers)


@case("chat, `extra_headers`")
def header(question, budget_ms):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        extra_headers={"x-budget-ms": str(budget_ms)},
    )
    answer = raw.parse()
    text = answer.choices[0].message.content
    return seen(answer, text, raw.headers)


@case("stream, `extra_body`, `stream_options`")
def streamed(question, budget_ms):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"budget_ms": budget_ms},
    )
    chunks = list(raw.parse())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return seen(chunks[-1], text, raw.headers)


@case("tool, stream", question="Use the tool for {}")
def tool(question, budget_ms):
    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}
    function = {"name": "double", "parameters": parameters | {"required": ["number"]}}
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        tools=[{"type": "function", "function": function | {"strict": True}}],
        extra_body={"budget_ms": budget_ms},
    ) as stream:
        answer = stream.get_final_completion()
        headers = stream._response.headers
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "double", call
    return seen(answer, call.arguments, headers)


@case("`/v1/responses`, `extra_body`")
def respond(question, budget_ms):
    raw = client.responses.with_raw_response.create(
        model=MODEL, input=question, extra_body={"budget_ms": budget_ms}
    )
    answer = raw.parse()
    text = answer.output_text
    return seen(answer, text, raw.headers)


@case("`/v1/responses`, stream")
def respond_streamed(question, budget_ms):
    raw = client.responses.with_raw_response.create(
        model=MODEL, input=question, stream=True, extra_body={"budget_ms": budget_ms}
    )
    events = list(raw.parse())
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    return seen(events[-1].response, text, raw.headers)


@case("embeddings", decides=False)
def embeddings(question, _):
    answer = client.embeddings.create(model="small", input=question, encoding_format="float")
    return {"text": str(answer.data[0].embedding), "model": answer.model, "usage": True}


@case("models", decides=False)
def models(*_):
    return {"text": ", ".join(model.id for model in client.models.list())}
