"""What help shows exists."""

import itertools
import re

import pytest

from knobwise.__main__ import main
from knobwise.experiments.command_line.compose import compose_config
from knobwise.experiments.command_line.help import COMMON, help_lines
from knobwise.experiments.command_line.registry import config_groups, names_of_choices
from knobwise.experiments.command_line.verbs import VERBS


def shown(capsys, *words):
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_choice_in_help_can_be_given(verb, capsys):
    groups = config_groups(verb).keys() - {"experiment"}
    printed = shown(capsys, *verb.replace("_", " experiment=").split(), "--help")
    words = []
    for group in groups:
        choices = names_of_choices(group)
        assert f"Group: {', '.join(choices)}." in " ".join(printed.split())
        words.append([f"{group}={choice}" for choice in choices])
    for row in itertools.zip_longest(*words):  # one of each group at a time
        compose_config(verb, list(filter(None, row)))


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_first_what_people_use(verb, capsys):
    every = [line.key for line in help_lines(verb) if line.default]
    common = COMMON.get(verb, " ".join(every)).split()
    assert set(common) <= set(every)
    assert len(common) <= 16
    printed = shown(capsys, *verb.replace("_", " experiment=").split(), "--help")
    keys = [line.split()[0] for line in printed.splitlines()[2:] if line[:1].strip()]
    assert keys[: len(common)] == common
    # the rest follows
    assert set(every) <= set(re.findall(r"^[\w.]+", printed, re.MULTILINE))


def test_the_summary_lists_the_readers_of_profiles(capsys):
    (listed,) = re.findall(r"profile=([\w |]+),", shown(capsys, "--help"))
    assert sorted(listed.split(" | ")) == names_of_choices("profile")
