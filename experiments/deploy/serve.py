"""`knobwise serve`."""

from __future__ import annotations

from dataclasses import replace

from threadpoolctl import threadpool_limits

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.experiments.evidence.run_folder import controller_at
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.measured_with import measured_at_once
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
    if config.concurrency is None:
        path = of_run(config.checkpoint, "profile.path")
        config = replace(config, concurrency=measured_at_once(path))
    with threadpool_limits(1):
        serve(config, controller_at(config.checkpoint, config.rule))
