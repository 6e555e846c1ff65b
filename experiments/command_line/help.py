"""`knobwise VERB --help`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knobwise.experiments.command_line import compose
from knobwise.experiments.command_line.compose import Option
from knobwise.experiments.settings.options import VERBS

SWEEPS = """
Sweeps: knobwise train -m key=a,b … is Hydra's multirun. It runs every combination, by default one
after the other; knobwise train -m experiment=NAME runs those in the experiment's file. Several at a
time:
  hydra/launcher=joblib   processes on this machine; hydra.launcher.n_jobs=N sets how many
  hydra/launcher=ray      as many as Ray has cores, on this machine or a cluster"""


def help_lines(verb: str) -> list[Option]:
    """Return every option of a verb with its default."""
    if verb in ("compare", "decide"):
        # not composed, since `runs` and `requests` have no default
        settings = VERBS[verb]()
    else:
        settings = compose.read_settings(verb, [])
    return list(compose.options_in(settings, compose.groups_of(verb)))


def show_help(verb: str) -> None:
    """Print the options by section, then the experiments."""
    print(" ".join(str(VERBS[verb].__doc__).split()))
    sections = defaultdict[str, list[Option]](list)
    titles = {}
    for line in help_lines(verb):
        if not line.default:  # the title of a section
            titles[line.key] = f"{line.key}: {line.meaning}"
        else:
            sections[line.choice or line.key.rpartition(".")[0]].append(line)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for section, options in sections.items():
        print(f"\n{titles.get(section, section)}")
        _print_options(console, options)
    if verb.startswith("train"):
        print(f"\n{SWEEPS}\n\nExperiments and their questions\n")
        experiments = []
        for name in compose.choices_of("experiment"):
            question = compose.question_of(name).partition("?")[0]
            experiments.append(Option(f"experiment={name}", "", f"{question}?"))
        _print_options(console, experiments)


def _print_options(console: Console, options: Iterable[Option]) -> None:
    """Print a table of options with their defaults and meanings."""
    table = Table.grid(padding=(0, 2))
    for option in options:
        table.add_row(*map(escape, option[:3]))
    console.print(table)
