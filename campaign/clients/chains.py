"""What a client asks: servers one behind the other, up to a model."""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from campaign.clients.endpoint import full_endpoint
from campaign.clients.servers import (
    MODELS,
    Served,
    knobwise_serve,
    litellm_proxy,
    llama_cpp_server,
    transformers_serve,
)

SIMULATED = {"model": MODELS, "max_tokens": (16, 64)}
"""The knobs in front of the simulated endpoint."""
REAL = {"model": MODELS, "max_tokens": (64, 1024)}
"""Those in front of real servers, whose models write on until they have to stop."""


class Chain(NamedTuple):
    """Servers that run."""

    url: str
    """What clients ask."""
    served: Served
    knobs: dict
    """Their values by name."""
    received: list | None = None
    """What the endpoint was sent; None where that is not known."""
    key: str = "none"
    """What clients bring."""


@contextmanager
def plain(folder, responds=True):
    """knobwise in front of the simulated endpoint, which may lack /v1/responses."""
    folder.mkdir()
    with (
        full_endpoint(responds) as endpoint,
        knobwise_serve(folder / "knobwise", SIMULATED, endpoint.url) as served,
    ):
        yield Chain(served.url, served, SIMULATED, endpoint.state.received)


@contextmanager
def litellm(folder):
    """A LiteLLM proxy in front of both."""
    with plain(folder) as chain, litellm_proxy(folder / "proxy", chain.url) as (url, key):
        yield chain._replace(url=url, key=key)


@contextmanager
def behind(folder, real_server, top_k):
    """A LiteLLM proxy, knobwise, and a real server with tiny models.

    Args:
        top_k: the further field by which knobwise tells the server of `top_k`.
    """
    folder.mkdir()
    with (
        real_server(folder / "server") as address,
        knobwise_serve(folder / "knobwise", REAL, address, f"extra_body={top_k}") as served,
        litellm_proxy(folder / "proxy", served.url) as (url, key),
    ):
        yield Chain(url, served, REAL, key=key)


CHAINS = {
    "plain": plain,
    "chats": partial(plain, responds=False),
    "litellm": litellm,
    "transformers": partial(
        behind,
        real_server=transformers_serve,
        # it knows no such field, but takes all of a generation's settings as text
        top_k='{generation_config: \'{"do_sample": true, "top_k": 20}\'}',
    ),
    "llama_cpp": partial(behind, real_server=llama_cpp_server, top_k="{top_k: 20}"),
    "llama_cpp_in_turn": partial(
        behind, real_server=partial(llama_cpp_server, interrupts=False), top_k="{top_k: 20}"
    ),
}
