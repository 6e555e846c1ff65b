"""`knobwise serve`."""

from __future__ import annotations

from dataclasses import replace

from threadpoolctl import threadpool_limits

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.common.progress import say
from knobwise.experiments.evidence.run_folder import controller_at
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.measured_with import (
    every_request,
    measured_at_once,
    not_sent,
)
from knobwise.serving.proxy.settings import ServeRun


def serve_controller(config: ServeRun) -> None:
    """Serve until interrupted.

    Raises:
        InputError: a mistake in the settings, no such checkpoint, an endpoint that cannot be
            reached, a port that is taken, or packages that are missing.
    """
    try:
        from knobwise.serving.proxy.server import serve
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve: {error.name} is not installed; {install_command('serve')}"
        ) from error
    path = of_run(config.checkpoint, "profile.path")
    if config.concurrency is None:
        config = replace(config, concurrency=measured_at_once(path))
    measured = every_request(path)
    if measured is not None and config.endpoint is not None:
        instead = "those of clients are sent as they are"
        for line in not_sent(measured, config.extra_body, config.messages, instead):
            say(line)
    with threadpool_limits(1):
        serve(config, controller_at(config.checkpoint, config.rule))
