"""Puts the server together from its settings, checks everything, and serves."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import uvicorn

from knobwise.agents.deployed.controller import NumpyController
from knobwise.agents.learning.request_log import RequestLog
from knobwise.common.errors import InputError
from knobwise.common.imports import import_callable
from knobwise.common.progress import say
from knobwise.envs.tables.units import MS
from knobwise.profiling.endpoint.messages import message_function
from knobwise.profiling.endpoint.prices import Price, lacking_tiers, read_prices
from knobwise.serving.proxy.chat import RequestFeatures
from knobwise.serving.proxy.endpoint_answers import EndpointAnswers
from knobwise.serving.proxy.guards import LOOPBACK, Guards, hosts_of
from knobwise.serving.proxy.knob_fields import KnobFields
from knobwise.serving.proxy.metrics import ServerMetrics
from knobwise.serving.proxy.passing import Passing
from knobwise.serving.proxy.proxy import ChatProxy
from knobwise.serving.proxy.restart import leave, take_over
from knobwise.serving.proxy.routes import Routes, application
from knobwise.serving.proxy.settings import ServeRun
from knobwise.serving.proxy.under_way import UnderWay, cut_off, running
from knobwise.serving.proxy.upstream import Upstream
from knobwise.serving.proxy.walk import USD, Walk, checked_budget, checked_default
from knobwise.serving.proxy.workers import Worker, listen, serve_in_workers
from knobwise.serving.runtime import Runtime

if TYPE_CHECKING:
    from knobwise.envs.tables.profile_table import KnobValue

TOKEN = "KNOBWISE_TOKEN"
"""The variable with the token that clients must bring."""
KEY = "OPENAI_API_KEY"
"""The variable with the key of the endpoint."""
THREADS = 40
"""Calls that may block a process at once: functions of features, and rows of the log."""


def serve(config: ServeRun, controller: NumpyController) -> None:
    """Serve a controller until interrupted. Raises InputError as `knobwise serve`; nothing is
    written then."""
    # first everything that may be refused; the log, which writes, comes later
    runtime = Runtime(
        controller,
        tracker=config.tracker,
        explore=config.explore,
        explore_loss=config.explore_loss,
    )
    if config.watch is not None:
        runtime.watch(config.watch)
    budget = _default_budget(config, controller)
    prices = None if config.prices is None else _prices(config.prices, runtime.configurations)
    token = os.environ.get(TOKEN) or None
    known = runtime.configurations
    upstream = None
    fields = None
    shadow = None
    if config.endpoint is not None:
        key = os.environ.get(KEY) or None
        upstream = Upstream(config.endpoint, key, token is not None, config.timeout_s)
        messages = None if config.messages is None else message_function(config.messages)
        fields = KnobFields(known, messages, config.extra_body, config.override)
        shadow = checked_default(fields, runtime, config.shadow, config.default)
        upstream.check()
    features = _request_features(config, controller)
    hosts = hosts_of(config.host, config.names)
    guards = Guards(hosts, token, round(config.max_body_mb * 1e6))
    # once the port is there, the workers of a server that was killed are gone
    with listen(config.host, config.port) as listening:
        runtime.log = RequestLog(config.log)
        with running(Path(config.log)) as (folder, broken):
            metrics = ServerMetrics(folder)
            chats = None
            passing = None
            answers = None
            if upstream is not None and fields is not None:
                walk = Walk(
                    runtime,
                    fields,
                    features,
                    metrics,
                    budget=budget,
                    log_prompts=config.log_prompts,
                    shadow=shadow,
                    prices=prices,
                )
                # what is no time is the cost of a whole answer
                answers = EndpointAnswers()
                first_counts = config.timed == "first_chunk" and controller.unit == MS
                timed = first_counts, _at_once(config)
                chats = ChatProxy(guards, walk, upstream, metrics, answers, *timed)
                models = [str(values["model"]) for values in known if "model" in values]
                models = [*dict.fromkeys(models)]
                passing = Passing(guards, upstream, metrics, models, config.opened)
            routes = Routes(guards, runtime, metrics, broken, answers)
            app = application(routes, chats, passing, _connected(upstream))

            def began(server: uvicorn.Server) -> None:
                routes.stopping = lambda: server.should_exit
                if chats is not None:
                    chats.under_way = UnderWay(folder)
                    chats.stopping = lambda: server.should_exit

            def leaves() -> None:
                try:
                    leave(Path(config.log), runtime.tracker.state(), metrics.promises())
                except OSError as error:
                    say(f"log={config.log}: the tracker's state cannot be written ({error})")

            def gone(process: int) -> None:
                metrics.broken.inc(cut_off(folder, str(process)))

            metrics.broken.inc(broken)
            worker = Worker(app, began, leaves, listening, config.drain_s)
            _say(config, listening.getsockname()[1], broken, token, controller)
            _go_on(config, runtime, metrics)
            if prices and (lacking := lacking_tiers(prices, known)):
                say(f"{config.prices}: {lacking}; until then nobody knows what such answers cost")
            if fields is not None and (texts := fields.texts_of_truth):
                say(
                    f"{', '.join(texts)}: is sent as the text 'true' or 'false', since the "
                    "controller has it so; if true and false were measured, train it again"
                )
            if upstream is not None and (missing := features.only_from_requests):
                say(f"requests must bring these features, or static decides: {missing}")
            serve_in_workers(worker, config.workers, config.drain_s, gone)
            promised, answered = metrics.promised_of()
            if answered:
                say(
                    f"a share on time was promised of {promised:,} of {answered:,} answered "
                    f"requests ({promised / answered:.1%})"
                )


def _request_features(config: ServeRun, controller: NumpyController) -> RequestFeatures:
    """Return what reads the features of requests."""
    prompt = config.prompt
    if prompt is None:
        prompt = next(iter(controller.texts)) if len(controller.texts) == 1 else "prompt"
    return RequestFeatures(
        _features(config.features),
        prompt,
        controller.feature_sizes,
        [column[0] for column in controller.columns],
    )


def _say(
    config: ServeRun, port: int, broken: int, token: str | None, controller: NumpyController
) -> None:
    """Say where the server listens, and what its operator should know."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    behind = f"/v1 in front of {config.endpoint}" if config.endpoint else ", decisions only"
    say(f"http://{host}:{port}{behind}; the log is in {config.log}")
    if controller.unit != MS and config.prices is None:
        say(f"without prices=FILE nobody knows whether budgets in {controller.unit} are kept")
    if config.endpoint and USD in controller.limits.declared and config.prices is None:
        say(f"without prices=FILE nobody knows whether the limit on {USD} is kept")
    if broken:
        say(f"requests that broke off when the server before this one was killed: {broken}")
    if config.host not in LOOPBACK and token is None:
        say(f"whoever can reach this port can use it; set {TOKEN} in the environment")
    if config.host not in LOOPBACK and not config.names:
        say("any host name is taken, also one that a foreign page points here; give names=[…]")


def _go_on(config: ServeRun, runtime: Runtime, metrics: ServerMetrics) -> None:
    """Go on with what the server before this one has left of the same controller."""
    state = take_over(Path(config.log), runtime.controller.digest)
    if state is None:
        return
    tracker = runtime.tracker
    try:
        if config.tracker:
            tracker.restore(state["tracker"])
        slower = math.exp(tracker.level)
        metrics.take_promises(state["promises"], slower)
    except (AttributeError, InputError, KeyError, TypeError, ValueError):
        # whoever has changed it; nothing of it is needed
        return
    if tracker.answers:
        metrics.level.set(slower)
    say(
        f"goes on with what the server before this one has learned from {tracker.answers} answers: "
        f"latencies are {slower:.3g} times those of the profile"
    )


def _at_once(config: ServeRun) -> float | None:
    """Return how many requests each process may have under way; None if that is not known."""
    if config.concurrency is None:
        return None
    # a process knows of its own requests only
    return max(1.0, config.concurrency / config.workers)


@asynccontextmanager
async def _connected(upstream: Upstream | None) -> AsyncIterator[None]:
    """Keep threads for what blocks, and connections to the endpoint, while a process serves."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    if upstream is None:
        yield
        return
    async with upstream.connected():
        yield


def _features(name: str | None) -> Callable[..., object] | None:
    """Return the user's own function of the features; None if none is named."""
    if name is None:
        return None
    return import_callable(f"features={name}", name, "function", "my_module:features")


def _prices(path: str, configurations: Sequence[Mapping[str, KnobValue]]) -> dict[str, Price]:
    """Return prices by model. Raises InputError if one of a model that may be chosen is missing."""
    prices = read_prices(path)
    for configuration in configurations:
        model = configuration.get("model")
        if model is not None and model not in prices:
            raise InputError(f"{path}: has no price of {model}")
    return prices


def _default_budget(config: ServeRun, controller: NumpyController) -> float:
    """Return the budget of requests without one, in the controller's unit. Raises InputError if
    there is none, or, as a mean, if it was not calibrated."""
    if config.budget_ms is not None:
        return checked_budget(config.budget_ms, controller, "budget_ms")
    if controller.trained_ms is None:
        raise InputError(
            "budget_ms: the controller was calibrated for no budget; give the one of requests that "
            "bring none"
        )
    # calibrated in float32; as it was typed, so that what costs exactly so much keeps it
    return float(str(np.float32(controller.trained_ms.max())))
