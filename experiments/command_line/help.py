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
COMMON = {
    "train": """
        experiment profile profile.path profile.features budget budgets_ms policy loss
        optimiser.iterations optimiser.lr seeds name runs tracking device""",
    "train_selector": """
        experiment beams beams.path encoder shots judged_shots sft.epochs grpo.epochs grpo.lr
        seeds jobs name runs tracking device""",
    "evaluate": """
        checkpoint profile profile.path profile.features beams budgets_ms baselines live
        stream.requests json""",
    "explain": "checkpoint profile profile.path profile.features sample budget_ms tracker json",
    "inspect": "profile profile.path profile.features log json html",
    "profile": "model data out knobs importance device vlm.data vlm.embeddings checkpoint",
    "export": "checkpoint profile profile.path profile.features out onnx int8",
    "decide": "requests checkpoint budget_ms out",
    "update": """
        checkpoint log out accept rollback every profile profile.path trained_on trained_on.path""",
}
"""The options that people use most, by verb; help shows them first."""


def help_lines(verb: str) -> list[Option]:
    """Return every option of a verb with its default."""
    if verb in ("compare", "decide"):
        # not composed, since `runs` and `requests` have no default
        settings = VERBS[verb]()
    else:
        settings = compose.read_settings(verb, [])
    return list(compose.options_in(settings, compose.groups_of(verb)))


def show_help(verb: str) -> None:
    """Print the options that people use most, then all others by section, then the experiments."""
    print(" ".join(str(VERBS[verb].__doc__).split()), "\n")
    # what people use most comes first, in the order of `COMMON`
    lines = help_lines(verb)
    common = COMMON.get(verb, " ".join(line.key for line in lines)).split()
    # several choices of a group may have the same key: reversed, so that the first of them is kept
    first = {line.key: line for line in reversed(lines) if line.key in common}
    console = Console(width=None if sys.stdout.isatty() else 160)
    _print_options(console, [first[key] for key in common if key in first])
    # all other options under the heading of their section
    sections = defaultdict[str, list[Option]](list)
    titles = {}
    for line in lines:
        if not line.default:  # the title of a section
            titles[line.key] = f"{line.key}: {line.meaning}"
        elif first.get(line.key) != line:
            sections[line.choice or line.key.rpartition(".")[0]].append(line)
    # those without a section come first
    for section in sorted(sections, key=bool):
        print(f"\n{titles.get(section, section or 'others')}")
        _print_options(console, sections[section])
    if verb.startswith("train"):
        print(f"\n{SWEEPS}\n\nExperiments and their questions\n")
        experiments = []
        for name in compose.choices_of("experiment"):
            question = compose.question_of(name).partition("?")[0]
            experiments.append(Option(f"experiment={name}", "", f"{question}?"))
        _print_options(console, experiments)


def _print_options(console: Console, options: Iterable[Option]) -> None:
    """Print a table of options with their defaults and meanings."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for width in (34, 22, None):
        table.add_column(overflow="fold", min_width=width)
    for option in options:
        table.add_row(*map(escape, option[:3]))
    console.print(table)
