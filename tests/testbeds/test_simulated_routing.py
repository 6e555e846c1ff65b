"""The simulated table of evaluations: what the simulated endpoint would answer, and its price."""

import subprocess
import sys

import polars as pl
import pytest

from knobwise.testbeds.simulated_models import difficulty_of, known_questions
from knobwise.testbeds.simulated_routing import EFFORTS, PRICES, evaluations


def test_evaluations_are_those_of_the_models():
    frame = evaluations(40)
    assert len(frame) == 40 * len(PRICES) * len(EFFORTS)
    # a model that thinks no less is right where it was before
    scores = frame.pivot("reasoning_effort", index=["id", "model"], values="score")
    assert (scores["none"] <= scores["high"]).all()
    # 7 words of a message are some 18 tokens; an answer of one token costs .4 millionths
    row = frame.row(0, named=True)
    tokens_in = (row["usd"] * 1e6 - 0.4) / 0.1
    assert tokens_in == pytest.approx(round(tokens_in))
    assert evaluations(40).equals(frame)


def test_what_a_question_is_about_tells_how_difficult_it_is():
    about = [
        (difficulty_of(text, "small"), known.kind) for text, known in known_questions().items()
    ]
    frame = pl.DataFrame(about, schema=["difficulty", "kind"], orient="row")
    of_kind = frame.group_by("kind").agg(pl.mean("difficulty"))
    # √(.2² + .4²) of the deviation of a uniform number, .289, is .129; what is left has .082
    assert 0.08 < of_kind["difficulty"].std() < 0.2
    assert difficulty_of("1 + 1", "small") < difficulty_of("123456 + 123456", "small")


def test_the_command_writes_the_table(tmp_path):
    command = [sys.executable, "-m", "knobwise.testbeds.simulated_routing"]
    subprocess.run([*command, tmp_path / "table.csv", "5"], check=True)
    assert len(pl.read_csv(tmp_path / "table.csv")) == 45
    wrong = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=False)
    assert wrong.returncode
    assert "Traceback" not in wrong.stderr


def test_only_the_server_needs_what_serves(tmp_path):
    # an install without the extra `serve`
    without = "import runpy, sys; sys.modules |= dict.fromkeys(('uvicorn', 'starlette'))\n"
    for module, words, status in (
        ("routing", [tmp_path / "table.csv", "5"], 0),
        ("endpoint", ["8001"], 2),
    ):
        run = f"runpy.run_module('knobwise.testbeds.simulated_{module}', run_name='__main__')"
        command = [sys.executable, "-c", without + run, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert "[serve]" in done.stderr
