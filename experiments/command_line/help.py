"""`knobwise VERB --help`, and the completion of words in a shell."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from omegaconf import MISSING
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knobwise.common.errors import InputError
from knobwise.experiments.command_line import compose
from knobwise.experiments.command_line.compose import Option
from knobwise.experiments.settings.options import EXPERIMENTS, VERBS

TEXTS = tomllib.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))
COMMON: dict[str, str] = TEXTS["common"]
"""The options that people use, which help shows first, by verb."""
SCRIPTS: dict[str, str] = TEXTS["completion"]
"""The script of each shell, which calls `knobwise completion words LINE`."""


def help_lines(verb: str) -> list[Option]:
    """Every option of a verb, with the default that holds when nothing else is set."""
    needed = [f.name for f in fields(VERBS[verb]) if f.default is MISSING and f.name not in compose.GROUPS_OF[verb]]
    settings = compose.read_settings(verb, [f"{key}=[]" for key in needed])
    for key in needed:
        setattr(settings, key, MISSING)
    return list(compose.options_in(settings, compose.GROUPS_OF[verb]))


def show_help(verb: str) -> None:
    """Print the options that people use, then all others by section, then the experiments."""
    print(" ".join(str(VERBS[verb].__doc__).split()), "\n")
    lines = help_lines(verb)
    common = COMMON.get(verb, " ".join(line.key for line in lines)).split()
    first = {line.key: line for line in reversed(lines) if line.key in common}
    console = Console(width=None if sys.stdout.isatty() else 160)
    _print_options(console, [first[key] for key in common if key in first])
    sections: dict[str, list[Option]] = {"others": []}
    titles = {line.key: f"{line.key}: {line.meaning}" for line in lines if not line.default}
    for line in lines:
        if line.default and first.get(line.key) != line:
            sections.setdefault(line.choice or line.key.rpartition(".")[0] or "others", []).append(line)
    for section, options in sections.items():
        if options:
            print(f"\n{titles.get(section, section)}")
            _print_options(console, options)
    if verb in EXPERIMENTS:
        print(f"\n{TEXTS['sweeps']}\n\nExperiments and their questions\n")
        table = Table(box=None, pad_edge=False, show_header=False)
        for name in compose.experiments():
            table.add_row(f"experiment={name}", compose.question_of(name).partition("?")[0] + "?")
        console.print(table)


def _print_options(console: Console, options: Iterable[Option]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for width in (34, 22, None):
        table.add_column(overflow="fold", min_width=width)
    for key, default, meaning, _ in options:
        table.add_row(*map(escape, (key, default, meaning)))
    console.print(table)


def complete(words: list[str]) -> None:
    """`knobwise completion SHELL`: print its script. Raises InputError for an unknown shell."""
    if len(words) == 2 and words[0] == "words":
        for name in completions(words[1]):
            print(name)
    elif len(words) == 1 and words[0] in SCRIPTS:
        print(SCRIPTS[words[0]], end="")
    else:
        raise InputError(f"knobwise completion: give one of {', '.join(SCRIPTS)}")


def completions(line: str) -> list[str]:
    """What the last word of a command line may become: a verb, the next part of a key, or a value."""
    *before, word = line.split(" ")
    verbs = [verb for verb in VERBS if not verb.startswith("train_")] + ["completion"]
    typed = [other for other in before[1:] if other]
    if not typed:
        return [f"{verb} " for verb in verbs if verb.startswith(word)]
    if typed[0] == "completion":
        return [name for name in SCRIPTS if name.startswith(word)]
    if typed[0] not in verbs:
        return []
    verb = compose.schema_of(typed[0], typed)
    key, equals, value = word.partition("=")
    options = compose.schema_options(verb)
    if equals:
        values = ["true", "false"] if key in options and options[key].default in ("True", "False") else []
        if key in compose.GROUPS_OF[verb] or key == "experiment":
            values = list(compose.GROUPS.get(key, ())) or compose.experiments()
        return [f"{key}={name} " for name in values if name.startswith(value)]
    # one part of a key at a time: `policy.` before `policy.hidden=`
    depth = word.count(".") + 1
    names = [".".join(name.split(".")[:depth]) + ("." if name.count(".") >= depth else "=") for name in options]
    sections = {name for name in names if name.endswith(".") and name[:-1] not in compose.GROUPS_OF[verb]}
    names = [name for name in names if name in sections or f"{name[:-1]}." not in sections]
    return [name for name in dict.fromkeys(names) if name.startswith(word)]
