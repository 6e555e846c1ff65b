"""The command line: `knobwise VERB key=value …`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from knobwise import __version__
from knobwise.common.errors import InputError
from knobwise.common.files import check_address_space, refused_by_system, system_limit_of
from knobwise.common.interruption import status_of, stopped_by_signals
from knobwise.common.lazy import uncollected
from knobwise.common.progress import say
from knobwise.experiments.command_line.verbs import LIGHT, plain_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERBS = {
    "train": "command_line.train:train",
    "evaluate": "deploy.evaluate:evaluate_run",
    "explain": "deploy.explain:explain_run",
    "compare": "report.report:compare",
    "inspect": "command_line.profile:inspect",
    "profile": "command_line.profile:profile",
    "export": "deploy.export:export_controller",
    "decide": "deploy.decide:decide_requests",
    "update": "deploy.update:update_controller",
    "serve": "deploy.serve:serve_controller",
    "workspace": "tracking.workspace:workspace",
}
"""The function of each verb, as module:name. It is imported only when it runs: an import takes
longer than the answer to a mistake."""


def _open_closed_streams() -> None:
    """Open stdin, stdout and stderr again where they were closed before Python began. Otherwise
    libraries miss them, and the next file that is opened gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, stream := open(os.devnull, mode))  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb, and return the exit status.

    It is 0 on success, 1 after a failure of the program or the system, 2 after a mistake of the
    user, 3 if `decide` refused some requests, 130 after Ctrl-C, 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a stream may take ASCII alone
    try:
        Path.cwd()
    except FileNotFoundError:
        say(
            "knobwise: the working folder was removed; "
            "go to another one, then give the command again"
        )
        return 2
    try:
        with redirect_stdout(_Output(sys.stdout)), stopped_by_signals():
            return _run(arguments)
    except InputError as error:
        say(f"knobwise: {error}")
        return 2
    except OSError as error:
        if (refused := refused_by_system(error)) is None:
            raise
        say(f"knobwise: {refused[1]}")
        return refused[0]
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ())
        say("\n".join(["\nknobwise: interrupted", *notes, *_how_to_resume(arguments)]))
        return status_of(stop)
    except BaseException as error:  # libraries name limits in errors of their own
        if not (limit := system_limit_of(error)):
            raise
        say(f"knobwise: {limit}, then give the same command again")
        return 1
    finally:
        # a failing flush at the end of Python would give a status of its own
        for stream in (sys.stdout, sys.stderr):
            _Output(stream).flush()


class _Output:
    """A stream whose reader may leave, as in `| head`. Later output is dropped, and the work goes
    on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._survive(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._survive(self._stream.flush)

    def _survive(self, write: Callable[..., object], *text: str) -> None:
        try:
            write(*text)
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def _how_to_resume(arguments: list[str]) -> list[str]:
    """Return a line with the command that resumes an interrupted one."""
    if arguments[:1] not in (["train"], ["profile"]):
        return []
    return [f"repeat the command to resume:\n  knobwise {shlex.join(arguments)}"]


def _run(arguments: list[str]) -> int:
    """Run the verb that the arguments begin with, and return the exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(Path(__file__).with_name("usage.txt").read_text(encoding="utf-8"))
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        print(f"knobwise {__version__}")
        return 0
    verb = arguments[0]
    arguments = arguments[1:]
    if verb not in VERBS:
        hint = f"the verbs are {', '.join(VERBS)} (knobwise --help)"
        if nearest := get_close_matches(verb, VERBS, n=1):
            hint = f"did you mean knobwise {nearest[0]}?"
        raise InputError(f"there is no verb {verb!r}; {hint}")
    config = plain_settings(verb, arguments) if verb in LIGHT else None
    if config is None:
        config = _composed(verb, arguments)
    # help and sweeps are done
    if config is None:
        return 0
    check_written(config, verb)
    if rule := getattr(config, "rule", None):
        # a run names its rule, but only the user gives its code
        from knobwise.envs.bandit.rule_choice import take_rule

        take_rule(rule, f"rule={rule}")
    if verb not in LIGHT:
        check_address_space()
    # what runs may need torch, which takes seconds to import
    module, _, name = VERBS[verb].partition(":")
    with uncollected():
        run = getattr(import_module(f"knobwise.experiments.{module}"), name)
    if verb == "train":
        run(config, arguments, arguments)
        return 0
    status = run(config)
    return status if verb == "decide" else 0


def _composed(verb: str, arguments: list[str]) -> Any:
    """Return the settings that Hydra composes for a verb; None once help was shown or a sweep was
    run, which the arguments asked for instead."""
    # imported here, since Hydra takes long to import
    with uncollected():
        from knobwise.experiments.command_line import compose
        from knobwise.experiments.command_line.flags import SWEEP, refuse_flags
        from knobwise.experiments.command_line.help import show_help
        from knobwise.experiments.command_line.registry import schema_of

    # help, sweeps and single runs need the settings of the verb
    schema = schema_of(verb, arguments)
    if not {"-h", "--help"}.isdisjoint(arguments):
        show_help(schema)
        return None
    refuse_flags(schema, arguments)
    if verb == "train" and not set(SWEEP).isdisjoint(arguments):
        from knobwise.experiments.command_line.train import train

        compose.run_hydra(schema, arguments, partial(train, once=True))
        return None
    if verb == "compare":
        arguments = _with_runs(arguments)
    return compose.read_settings(schema, arguments)


def _with_runs(arguments: list[str]) -> list[str]:
    """Return the arguments of `compare`, with the folders as its option `runs`."""
    folders = [argument for argument in arguments if _is_run(argument)]
    if not folders:
        return arguments
    from knobwise.experiments.settings.words import quote_for_hydra

    listed = ",".join(map(quote_for_hydra, folders))
    return [f"runs=[{listed}]", *(argument for argument in arguments if argument not in folders)]


def _is_run(argument: str) -> bool:
    """Return True for an argument that names a folder, whether or not there is one."""
    key, equals, _ = argument.partition("=")
    if not equals or Path(argument).is_dir():
        return True
    # a name may have = in it; what is no option is meant as one
    is_word = re.fullmatch(r"\+*[a-z_.]+", key) and "/" not in argument
    return not (is_word or key.lstrip("+") in ("runs", "html", "json") or key.startswith("-"))


def check_written(config: DataclassInstance, verb: str) -> None:
    """Refuse files and folders that cannot be written, before anything takes time.

    Raises:
        InputError: a folder where a file is to be written, or the other way round, or no
            permission.
    """
    for name in ("json", "html", "out", "runs"):
        value = getattr(config, name, None)
        # options that this verb does not have
        if value is None or isinstance(value, list):  # `compare` reads its runs
            continue
        if not str(value).strip():
            raise InputError(f"{name}=: is empty; give a path, or leave it out")
        is_file = name in ("json", "html") or (name == "out" and verb == "decide")
        # the folder that exists, in which others would be made
        folder = Path(value)
        if is_file:
            folder = folder.parent
        while not folder.exists():
            folder = folder.parent
        is_folder = is_file and Path(value).is_dir()
        if is_folder or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{name}={value}: cannot be written in {folder}; choose another path")
