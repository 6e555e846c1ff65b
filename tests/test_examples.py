"""The scripts that people copy, each run as it stands there."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import words_of
from helpers import small_table
from PIL import Image

import knobwise
from knobwise import envs
from knobwise.testbeds import builtin_profile

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "policy": "utility",
    "policy.hidden": 16,
    "policy.fold_networks": 2,
    "optimiser": {"teacher_iterations": 5, "pretrain_iterations": 5, "iterations": 5},
}


@pytest.mark.parametrize("name", ["torchrl_loop", "own_model", "ppo"])
def test_an_example_fits_on_a_page(name):
    # lines with code: what explains is free
    code = (ROOT / "examples" / f"{name}.py").read_text().split('"""', 2)[2]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 60


@pytest.mark.campaign
def test_the_loop_learns():
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=60, iterations=20) > 0.4


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("train_with_torchrl_trainer", {"iterations": 100}),
        ("ppo", {"iterations": 15, "contexts": 512}),
    ],
)
def test_torchrl_alone_learns(name, settings):
    torch.manual_seed(0)
    before, after = example(name).main(**settings)
    assert after > before + 0.1


def example(name):
    """The module of an example."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / f"{name}.py")))


def test_every_example_is_here():
    names = words_of("""
        advantages deploy losses own_model own_table ppo rewards rules step_by_hand torchrl_loop
        train_with_torchrl_trainer
    """)
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == names


def test_step_by_hand(capsys, tmp_path):
    main = example("step_by_hand").main
    picture, film = tmp_path / "picture.png", tmp_path / "film.gif"
    reward = main()
    printed = capsys.readouterr().out
    assert f"reward {reward:+.2f}" in printed
    assert "budget 40.0 ms" in printed
    assert main(str(picture)) == reward
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 300
        assert len(drawn.getcolors(1 << 24)) > 50  # a drawing, not a blank
    rewards = re.findall(r"ms, reward ([+-][\d.]+)", printed)
    assert rewards == ["+1.00", "-0.20", "+1.00"]  # the second is late
    main(str(film))
    with Image.open(film) as frames:
        assert frames.n_frames == 6


@pytest.mark.campaign
def test_the_loop_is_as_good_as_the_heads_of_the_experiments():
    """`knobwise train experiment=heads policy=independent seeds=[0] own_cost=false` gives 0.478;
    this is held to within a point of it, by half of its iterations."""
    torch.manual_seed(1)
    assert example("torchrl_loop").main(warm_up=300, iterations=150) > 0.468


def test_own_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(envs, "builtin_profile", small_table)
    module = example("own_table")
    decisions = module.main(*module.builtin_files(tmp_path), **SMALL)
    printed = capsys.readouterr().out
    assert len(decisions) == 3
    assert all(f"ms: {decision}" in printed for decision in decisions)


def test_deploy(tmp_path, capsys):
    path = str(tmp_path / "policy.pt")
    knobwise.fit(builtin_profile(), **SMALL).save(path)
    on_time = example("deploy").main(path, requests=3)
    printed = capsys.readouterr().out
    assert len(on_time) == printed.count(" ms (") == 3
    assert printed.count("(late)") == 3 - sum(on_time)
