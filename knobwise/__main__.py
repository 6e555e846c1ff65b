"""The command line: `knobwise VERB key=value …`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from knobwise._version import __version__

USAGE = """knobwise: which setting of a model's knobs for which input, under a latency budget

  knobwise train      learn a controller from a profile, judge it beside every simple way, report
  knobwise evaluate   judge a trained controller again
  knobwise inspect    what is in a profile, and how much there is to gain
  knobwise profile    measure a model at every configuration

  knobwise VERB --help lists the settings; they are given as key=value, a sweep as -m key=a,b,c (train).
  Profiles: profile=builtin | exp5_exp6 | core_exp | table, for example
    knobwise train profile=table profile.path=measured.parquet profile.features=features.npz
"""


HYDRA_FLAGS = ("-m", "--multirun", "-c", "--cfg", "-i", "--info")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; 0 when all went well, 2 when something given was wrong, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"knobwise {__version__}")
        return 0
    from knobwise.envs.errors import InputError

    try:
        return _run(words[0], words[1:])
    except InputError as error:
        print(f"knobwise: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on where it stopped" if words[0] in ("train", "profile") else ""
        print(f"\nknobwise: interrupted{goes_on}", file=sys.stderr)
        return 130


def _run(verb: str, words: list[str]) -> int:
    from knobwise.envs.errors import InputError

    verbs: dict[str, Callable[[Any, list[str]], None]] = {
        "train": _train,
        "evaluate": _evaluate,
        "inspect": _inspect,
        "profile": _profile,
    }
    if verb not in verbs:
        raise InputError(f"unknown verb {verb!r}; known are {', '.join(verbs)} (knobwise --help)")
    from knobwise.experiments import settings

    if any(word in ("-h", "--help") for word in words):
        _help(verb, settings)
        return 0
    if verb == "train" and any(word in HYDRA_FLAGS for word in words):
        _train_by_hydra(words, settings)
        return 0
    verbs[verb](settings.read_settings(verb, words), words)
    return 0


def _train(config: Any, words: list[str]) -> None:
    from knobwise.experiments.controller import run

    run(config, words)


def _train_by_hydra(words: list[str], settings: Any) -> None:
    """Multirun (-m) and Hydra's own flags (--cfg job, …), with Hydra's launchers."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from knobwise.envs.errors import InputError

    words = sorted(words, key=lambda word: not word.startswith("-"))  # Hydra wants its flags first
    if "-m" in words or "--multirun" in words:
        settings.read_settings("train", settings.first_of_each_sweep(words))  # a mistake shows before any job runs
    settings.register()

    def job(config: Any) -> None:
        try:
            _train(settings.settings_of(config), list(HydraConfig.get().overrides.task))
        except InputError as error:
            print(f"knobwise: {error}", file=sys.stderr)
            raise SystemExit(2) from error

    sys.argv = ["knobwise train", *words]
    hydra.main(config_path=str(settings.CONF), config_name="train", version_base="1.3")(job)()


def _evaluate(config: Any, words: list[str]) -> None:
    from knobwise.experiments.evaluate import run

    run(config)


def _inspect(config: Any, words: list[str]) -> None:
    import json

    from rich.console import Console

    from knobwise.envs.files import written_whole
    from knobwise.experiments.inspection import inspect_table, print_inspection, write_inspection
    from knobwise.experiments.settings import read_profile

    facts = inspect_table(read_profile(config.profile))
    print_inspection(facts, Console())
    if config.json is not None:
        with written_whole(config.json) as temporary:
            temporary.write_text(json.dumps(facts, indent=1))
    if config.html is not None:
        print(f"page: {write_inspection(facts, config.html)}")


def _profile(config: Any, words: list[str]) -> None:
    from knobwise.envs.errors import InputError

    if config.model != "elastic":
        raise InputError(f"model={config.model!r}: knobwise can measure model=elastic")
    from knobwise.profiling.runner import profile_elastic

    try:
        print(f"profile: {profile_elastic(config.out, config.elastic)}")
    except ValueError as error:
        raise InputError(f"profile: {error}") from error


def _help(verb: str, settings: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    print(settings.VERBS[verb].__doc__, "\n")
    table = Table(box=None, pad_edge=False)
    for column in ("key", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for line in settings.help_lines(verb):
        table.add_row(*(word.replace("[", r"\[") for word in line))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
