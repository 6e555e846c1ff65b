"""`knobwise VERB --help`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import (
    Option,
    config_groups,
    names_of_choices,
    options_in,
    question_of_experiment,
)
from knobwise.experiments.command_line.verbs import settings_of_verb

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
    "profile": """
        model data out checkpoint knobs.samples knobs.values importance device endpoint prices
        max_usd concurrency workers vlm.data vlm.embeddings""",
    "export": "checkpoint profile profile.path profile.features out onnx int8",
    "serve": """
        checkpoint endpoint host port workers budget_ms extra_body messages features log explore
        watch override shadow""",
    "update": """
        checkpoint log out accept rollback profile profile.path trained_on trained_on.path""",
}
"""Verb → the options that people use most; of other verbs all options."""


def help_lines(verb: str) -> list[Option]:
    """Return every option of a verb with its default."""
    if verb in ("compare", "decide"):
        # not composed, since `runs` and `requests` have no default
        settings = settings_of_verb(verb)()
    else:
        settings = read_settings(verb, [])
    return list(options_in(settings, config_groups(verb)))


def show_help(verb: str) -> None:
    """Print the options that people use most, then all others by section, then the experiments."""
    print(" ".join(str(settings_of_verb(verb).__doc__).split()), "\n")
    lines = help_lines(verb)
    common = COMMON.get(verb, "").split() or [line.key for line in lines]
    # of several choices of a group that have an option, the first counts
    most_used = {line.key: line for line in reversed(lines) if line.key in common}
    console = Console(width=None if sys.stdout.isatty() else 160)
    _print_options(console, [most_used[key] for key in common])
    # those without a section come first
    sections: dict[str, list[Option]] = {"": []}
    titles = {"": "others"}
    for line in lines:
        if not line.default:  # the title of a section
            titles[line.key] = f"{line.key}: {line.meaning}"
        elif most_used.get(line.key) != line:
            sections.setdefault(line.choice or line.key.rpartition(".")[0], []).append(line)
    for section, options in sections.items():
        if options:
            print(f"\n{titles.get(section, section)}")
            _print_options(console, options)
    if verb.startswith("train"):
        print(f"\n{SWEEPS}\n\nExperiments and their questions\n")
        experiments = []
        for name in names_of_choices("experiment"):
            question = question_of_experiment(name).partition("?")[0]
            experiments.append(Option(f"experiment={name}", "", f"{question}?"))
        _print_options(console, experiments)


def _print_options(console: Console, options: Iterable[Option]) -> None:
    """Print a table of options with their defaults and meanings."""
    table = Table.grid(padding=(0, 2))
    for option in options:
        table.add_row(escape(option.key), escape(option.default), escape(option.meaning))
    console.print(table)
