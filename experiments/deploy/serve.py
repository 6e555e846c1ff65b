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
    EveryRequest,
    every_request,
    measured_at_once,
)
from knobwise.experiments.settings.words import shell_word, value_for_hydra
from knobwise.profiling.endpoint.settings import LENGTHS
from knobwise.serving.proxy.settings import ServeRun


def not_sent(measured: EveryRequest, config: ServeRun) -> list[str]:
    """Return what every request had in measuring and has not in serving, so that answers are others
    than those of the profile; and how to send it."""
    lines = []
    extra = config.extra_body or {}
    missing = {}
    for name, value in measured.fields.items():
        # either name of the length will do
        names = LENGTHS if name in LENGTHS else (name,)
        if value not in [extra[each] for each in names if each in extra]:
            missing[name] = value
            extra = {key: value for key, value in extra.items() if key not in names}
    if missing:
        whole = shell_word("extra_body", value_for_hydra({**extra, **missing}))
        lines.append(
            f"the profile was measured with {', '.join(missing)} in every request, and here they "
            f"are sent otherwise or not at all; give {whole}"
        )
    if measured.messages is not None and config.messages is None:
        lines.append(
            f"the profile was measured with messages by {measured.messages}, and here those of "
            f"clients are sent as they are; give {shell_word('messages', measured.messages)}"
        )
    return lines


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
        for line in not_sent(measured, config):
            say(line)
    with threadpool_limits(1):
        serve(config, controller_at(config.checkpoint, config.rule))
