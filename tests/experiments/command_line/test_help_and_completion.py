"""What help and tab completion show exists."""

from __future__ import annotations

import itertools
import re

import pytest
from commands import Capture, Patch

from knobwise.__main__ import main
from knobwise.experiments.command_line.compose import composed, schema_of, schema_options
from knobwise.experiments.settings.options import VERBS


def shown(capsys: Capture, *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_every_name_in_help_can_be_given(capsys: Capture) -> None:
    (listed,) = re.findall(r"profile=([\w |]+),", shown(capsys, "--help"))
    words = {"train": {f"profile={name}" for name in listed.split(" | ")}}
    for schema in VERBS:
        for line in schema_options(schema).values():
            if names := re.match(r"Group: ([\w, ]+)\.", line.meaning):
                words.setdefault(schema, set()).update(
                    f"{line.key}={name}" for name in names[1].split(", ")
                )
    for word in re.findall(r"^experiment=[a-z]\w*", shown(capsys, "train", "--help"), re.MULTILINE):
        words[schema_of("train", [word])].add(word)
    assert {"profile=simulated", "reward=shaped", "experiment=seeds", "tracking=offline"} <= words[
        "train"
    ]
    assert {"beams=files", "experiment=selector_seeds"} <= words["train_selector"]
    tried: set[str] = set()
    for schema, choices in words.items():
        by_group: dict[str, list[str]] = {}
        for word in sorted(choices - tried):  # a group has the same choices in every verb
            by_group.setdefault(word.partition("=")[0], []).append(word)
        tried |= choices
        for row in itertools.zip_longest(*by_group.values()):  # one of each group at a time
            composed(schema, list(filter(None, row)))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("knobwise tr", ["train"]),
        ("knobwise train experiment=selector_se", ["experiment=selector_seeds"]),
        ("knobwise train -m experiment=kl loss.gr", ["loss.group_size="]),
        ("knobwise inspect profile=c", ["profile=core_exp"]),
    ],
)
def test_tab_completion(line: str, wanted: list[str], capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert shown(capsys, "-sc", "query=bash").split() == wanted


def test_the_function_that_completes_is_for_the_command(
    capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("sys.argv", ["/some/folder/knobwise"])
    assert shown(capsys, "-sc", "install=bash").endswith("hydra_bash_completion knobwise\n")
    assert main(["-sc"]) == 2
