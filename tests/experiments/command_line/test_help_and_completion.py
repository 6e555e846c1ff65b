"""What help and tab completion show exists."""

from __future__ import annotations

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
    tried = {f"profile={name}": "train" for name in listed.split(" | ")}
    for schema in VERBS:  # the choices of a group are the same in all verbs that have it
        for line in schema_options(schema).values():
            if names := re.match(r"Group: ([\w, ]+)\.", line.meaning):
                tried |= {f"{line.key}={name}": schema for name in names[1].split(", ")}
    names = re.findall(r"^experiment=[a-z]\w*", shown(capsys, "train", "--help"), re.MULTILINE)
    tried |= {name: schema_of("train", [name]) for name in names}
    assert {"profile=simulated", "reward=shaped", "experiment=seeds", "beams=files", "tracking=offline"} <= set(tried)
    for word, schema in tried.items():
        composed(schema, [word])


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


def test_the_function_that_completes_is_for_the_command(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/folder/knobwise"])
    assert shown(capsys, "-sc", "install=bash").endswith("hydra_bash_completion knobwise\n")
    assert main(["--shell-completion"]) == 2
