"""Semantic Kernel's service for chats."""

from cases import KEY, MODEL, URL, case, watched
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory


def service(**options):
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, **options)
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


def history(question):
    messages = ChatHistory()
    messages.add_user_message(question)
    return messages


def seen(message):
    about = message.metadata
    usage = about.get("usage")
    return {
        "text": str(message),
        # it shows the name that was asked for
        "model": message.ai_model_id,
        "request_id": None,
        "answer_id": about.get("id"),
        "usage": bool(usage and usage.completion_tokens),
    }


@case("chat, `extra_body`")
async def plain(question, budget_ms):
    settings = OpenAIChatPromptExecutionSettings(extra_body={"budget_ms": budget_ms})
    return seen(await service().get_chat_message_content(history(question), settings))


@case("chat, `default_headers`")
async def header(question, budget_ms):
    asks = service(default_headers={"x-budget-ms": str(budget_ms)})
    settings = OpenAIChatPromptExecutionSettings()
    return seen(await asks.get_chat_message_content(history(question), settings))


@case("chat, an HTTP client with a hook")
async def hook(question, budget_ms):
    watch = watched(DefaultAsyncHttpxClient)
    asks = service(http_client=watch.client)
    settings = OpenAIChatPromptExecutionSettings(extra_body={"budget_ms": budget_ms})
    message = await asks.get_chat_message_content(history(question), settings)
    return seen(message) | watch.seen


async def streamed(question, **options):
    settings = OpenAIChatPromptExecutionSettings(**options)
    parts = service().get_streaming_chat_message_content(history(question), settings)
    joined = None
    async for part in parts:
        joined = part if joined is None else joined + part
    return seen(joined)


@case("stream")
async def stream(question, budget_ms):
    return await streamed(question, extra_body={"budget_ms": budget_ms})
