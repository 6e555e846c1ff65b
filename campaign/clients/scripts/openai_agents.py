"""The Agents SDK of OpenAI, with its default model class and with the one for chats."""

from cases import MODEL, URL, case, watched
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


def chat_model(**options):
    client = AsyncOpenAI(base_url=URL, api_key="none", **options)
    return OpenAIChatCompletionsModel(model=MODEL, openai_client=client)


def seen(result):
    response = result.raw_responses[-1]
    usage = bool(response.usage.output_tokens)
    return {
        "text": str(result.final_output),
        # a response does not say which model answered
        "model": None,
        "request_id": response.request_id,
        # of a stream of chunks it makes one up
        "answer_id": (response.response_id or "").replace("__fake_id__", ""),
        "usage": usage,
    }


async def asked(question, model, tools=(), **settings):
    agent = Agent(
        name="asks", model=model, tools=list(tools), model_settings=ModelSettings(**settings)
    )
    return await Runner.run(agent, question)


async def streamed(question, model, **settings):
    agent = Agent(name="asks", model=model, model_settings=ModelSettings(**settings))
    result = Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result


@case("chat, `extra_body`")
async def plain(question, budget_ms):
    return seen(await asked(question, chat_model(), extra_body={"budget_ms": budget_ms}))


@case("chat, `extra_headers`")
async def header(question, budget_ms):
    headers = {"x-budget-ms": str(budget_ms)}
    return seen(await asked(question, chat_model(), extra_headers=headers))


@case("chat, an HTTP client with a hook")
async def hook(question, budget_ms):
    watch = watched(DefaultAsyncHttpxClient)
    model = chat_model(http_client=watch.client)
    return seen(await asked(question, model, extra_body={"budget_ms": budget_ms})) | watch.seen


@case("stream")
async def plain_streamed(question, budget_ms):
    return seen(await streamed(question, chat_model(), extra_body={"budget_ms": budget_ms}))


@case("stream, `include_usage=True`")
async def streamed_with_usage(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}, "include_usage": True}
    return seen(await streamed(question, chat_model(), **settings))


@case("tool", question="Use the tool for {}")
async def tool(question, budget_ms):
    @function_tool
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    return seen(await asked(question, chat_model(), [double], extra_body={"budget_ms": budget_ms}))


@case("its default, a name")
async def default(question, budget_ms):
    return seen(await asked(question, MODEL, extra_body={"budget_ms": budget_ms}))


@case("`/v1/responses`, stream")
async def respond_streamed(question, budget_ms):
    client = AsyncOpenAI(base_url=URL, api_key="none")
    model = OpenAIResponsesModel(model=MODEL, openai_client=client)
    return seen(await streamed(question, model, extra_body={"budget_ms": budget_ms}))
