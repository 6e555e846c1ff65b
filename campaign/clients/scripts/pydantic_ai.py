"""Pydantic AI: an agent with OpenAIChatModel, and with the model that `openai:…` names."""

from cases import MODEL, URL, case, watched
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key="none")
chat = OpenAIChatModel(MODEL, provider=provider)


def seen(result, text=None):
    message = [part for part in result.all_messages() if part.kind == "response"][-1]
    return {
        "text": text or str(result.output),
        "model": message.model_name,
        # the headers are not to be had
        "request_id": None,
        "answer_id": message.provider_response_id,
        "usage": bool(result.usage.output_tokens),
    }


@case("chat, `extra_body`")
def plain(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return seen(Agent(chat).run_sync(question, model_settings=settings))


@case("chat, `extra_headers`")
def header(question, budget_ms):
    settings = {"extra_headers": {"x-budget-ms": str(budget_ms)}}
    return seen(Agent(chat).run_sync(question, model_settings=settings))


@case("chat, an HTTP client with a hook")
async def hook(question, budget_ms):
    watch = watched(DefaultAsyncHttpxClient)
    client = AsyncOpenAI(base_url=URL, api_key="none", http_client=watch.client)
    agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client)))
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return seen(await agent.run(question, model_settings=settings)) | watch.seen


@case("stream, `extra_body`")
async def streamed(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    async with Agent(chat).run_stream(question, model_settings=settings) as result:
        text = "".join([part async for part in result.stream_text(delta=True)])
        return seen(result, text)


@case("tool", question="Use the tool for {}")
def tool(question, budget_ms):
    agent = Agent(chat)

    @agent.tool_plain
    def double(number: int) -> int:
        return 2 * number

    settings = {"extra_body": {"budget_ms": budget_ms}}
    return seen(agent.run_sync(question, model_settings=settings))


@case("`openai:` name, its default")
def default(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return seen(Agent(f"openai:{MODEL}").run_sync(question, model_settings=settings))


@case("`openai-chat:` name")
def named(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    return seen(Agent(f"openai-chat:{MODEL}").run_sync(question, model_settings=settings))


@case("`/v1/responses`, stream")
async def respond_streamed(question, budget_ms):
    settings = {"extra_body": {"budget_ms": budget_ms}}
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider))
    async with agent.run_stream(question, model_settings=settings) as result:
        text = "".join([part async for part in result.stream_text(delta=True)])
        return seen(result, text)
