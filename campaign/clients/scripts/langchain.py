"""LangChain's ChatOpenAI. `include_response_headers` is what shows the headers."""

from cases import MODEL, URL, case, shown
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

usual = {"base_url": URL, "api_key": "none", "model": MODEL, "include_response_headers": True}


def seen(message):
    about = message.response_metadata
    return {
        "text": message.text,
        "model": about.get("model_name"),
        **shown(about.get("headers", {})),
        "answer_id": about.get("id"),
        "usage": bool(message.usage_metadata),
    }


@case("chat, `extra_body`")
def plain(question, budget_ms):
    llm = ChatOpenAI(**usual, extra_body={"budget_ms": budget_ms})
    return seen(llm.invoke(question))


@case("chat, `default_headers`")
def header(question, budget_ms):
    llm = ChatOpenAI(**usual, default_headers={"x-budget-ms": str(budget_ms)})
    return seen(llm.invoke(question))


@case("chat, `invoke(…, extra_body=…)`")
def of_a_call(question, budget_ms):
    return seen(ChatOpenAI(**usual).invoke(question, extra_body={"budget_ms": budget_ms}))


@case("stream")
def streamed(question, budget_ms):
    llm = ChatOpenAI(**usual, extra_body={"budget_ms": budget_ms})
    first, *rest = llm.stream(question)
    return seen(sum(rest, first))


@case("stream, `stream_usage=True`")
def streamed_with_usage(question, budget_ms):
    llm = ChatOpenAI(**usual, extra_body={"budget_ms": budget_ms}, stream_usage=True)
    first, *rest = llm.stream(question)
    return seen(sum(rest, first))


@case("tool", question="Use the tool for {}")
def tool(question, budget_ms):
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    llm = ChatOpenAI(**usual, extra_body={"budget_ms": budget_ms}).bind_tools([double])
    message = llm.invoke(question)
    return {**seen(message), "text": str(message.tool_calls[0]["args"])}


@case("`/v1/responses` by `reasoning=…`")
def respond(question, budget_ms):
    llm = ChatOpenAI(**usual, reasoning={"effort": "low"}, extra_body={"budget_ms": budget_ms})
    return seen(llm.invoke(question))


@case("`/v1/responses` by `reasoning=…`, stream")
def respond_streamed(question, budget_ms):
    llm = ChatOpenAI(**usual, reasoning={"effort": "low"}, extra_body={"budget_ms": budget_ms})
    first, *rest = llm.stream(question)
    return seen(sum(rest, first))


@case("embeddings", decides=False)
def embeddings(question, _):
    # else it counts tokens with files that it would fetch
    llm = OpenAIEmbeddings(
        base_url=URL, api_key="none", model="small", check_embedding_ctx_length=False
    )
    return {"text": str(llm.embed_query(question))}
