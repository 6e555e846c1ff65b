"""Words that are read without Hydra mean what they mean to Hydra, or are left to it."""

import subprocess
import sys

import pytest
from commands import words_of

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import config_groups
from knobwise.experiments.command_line.verbs import LIGHT, plain_settings

PLAIN = [
    "serve",
    "serve checkpoint=exported endpoint=http://127.0.0.1:8901/v1 port=0 log=served",
    "serve checkpoint=2024 rule=my_rules:Own host=0.0.0.0 budget_ms=60 timeout_s=0.50 workers=4",
    "serve checkpoint=true log=1e5 explore=0.1 tracker=false override=true watch=~/a-b/current",
    "serve features=my.module:function prompt=007 concurrency=8 endpoint=https://u@h/v1",
    "decide requests=r.csv checkpoint=runs/latest out=d.csv budget_ms=1500",
    "decide requests=-1.csv budget_ms=0",
    "decide requests=. budget_ms=-2.5",
]
LEFT = [
    # in Hydra's grammar
    "serve log='a'",
    "serve log=${host}",
    "serve names=[a,b]",
    "serve extra_body={a:1}",
    "serve default=null",
    "serve budget_ms=null",
    "serve watch=NULL",
    "serve budget_ms=1e3",
    "serve port=00",
    "serve tracker=False",
    "serve host=ä",
    "serve log=",
    "serve ++port=1",
    # mistakes
    "serve port=a",
    "serve port=70000",
    "serve port=1.5",
    "serve ports=1",
    "serve port",
    "serve --port=1",
    "serve --help",
    "serve workers=0",
    "serve port=1 port=2",
    "serve shadow=yes",
    "decide",
    "decide budget_ms=a requests=r.csv",
]


@pytest.mark.parametrize("typed", PLAIN)
def test_plain_words_mean_what_they_mean_to_hydra(typed):
    verb, *words = words_of(typed)
    settings = plain_settings(verb, words)
    wanted = read_settings(verb, words)
    assert settings == wanted
    # 60 and 60.0 are equal
    assert repr(settings) == repr(wanted)


@pytest.mark.parametrize("typed", LEFT)
def test_other_words_are_left_to_hydra(typed):
    verb, *words = words_of(typed)
    assert plain_settings(verb, words) is None


@pytest.mark.parametrize("verb", LIGHT)
def test_settings_that_are_read_without_hydra_have_no_groups(verb):
    assert config_groups(verb) == {}


def test_a_server_starts_without_hydra_and_torch():
    script = """
import sys
for name in ("hydra", "torch", "rich", "polars"):
    sys.modules[name] = None  # an import of it fails
from knobwise.__main__ import main
sys.exit(main(["serve", "checkpoint=none/controller.npz", "endpoint=http://127.0.0.1:1/v1"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "none/controller.npz" in done.stderr
