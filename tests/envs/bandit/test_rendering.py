"""What a person sees: in words, as a picture, in a window."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from helpers import input_error, small_table
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from knobwise.envs import BudgetConfig, ConfigBanditEnv
from knobwise.envs.bandit import rendering
from knobwise.envs.tables.profile_table import Knob

ID = "knobwise/ConfigBandit-v0"
TABLE = small_table()
RED = np.zeros((4, 4, 3), np.uint8) + np.array([255, 0, 0], np.uint8)


def pixels(picture, colour):
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(picture.astype(int) - wanted).max(-1) <= 3).sum())


@pytest.mark.parametrize(("constraint", "limit"), [("deadline", "budget_ms"), ("mean", "worth_ms")])
def test_words_say_what_can_be_set_and_what_happened(constraint, limit):
    env = ConfigBanditEnv(
        TABLE,
        BudgetConfig(constraint=constraint),
        render_mode="ansi",
        inputs=lambda name: (f"{name}?", None),
    )
    _, info = env.reset(seed=0)
    sample = info["sample_id"]
    asked, question, *knobs = env.render().splitlines()
    assert asked.startswith(f"Sample {sample}, ")
    assert f" {info[limit]:.2f} ms" in asked
    assert question == f"Question: {sample}?"
    assert knobs == ["  max_crops: 2, 6, 10", "  top_k: 4, 8", "  num_active_blocks: 12, 16"]
    _, reward, _, _, info = env.step(np.array([2, 1, 0]))
    words = env.render()
    *_, chosen, best, last = words.splitlines()
    for told in (
        "max_crops = 10, top_k = 8, num_active_blocks = 12",
        f"{info['accuracy']:.2f}",
        f"{info['latency_ms']:.2f} ms",
    ):
        assert told in chosen
    assert f"{reward:+.3f}" in last
    assert ("late" in chosen) == info.get("violation", False)
    assert f"{info['oracle_latency_ms']:.2f} ms" in best
    info.clear()  # it is the caller's
    assert env.render() == words


def test_a_picture_shows_the_input_the_choice_and_the_outcome():
    env = ConfigBanditEnv(
        TABLE, render_mode="rgb_array", inputs=lambda _: ("What colour is it?", RED)
    )
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.render()
    env.reset(options={"row": 3, "budget_ms": 1000.0})
    before = env.render()
    assert (before.shape, before.dtype) == ((520, 900, 3), np.uint8)
    assert pixels(before, "#ff0000") > 200**2  # the input
    assert not pixels(before, rendering._CHOSEN)
    env.step([2, 1, 0])
    on_time = env.render()
    assert pixels(on_time, rendering._CHOSEN) > 3 * 500  # a value of each knob
    assert pixels(on_time, rendering._ON_TIME) > 200  # the outcome, and the best values
    assert not pixels(on_time, rendering._LATE)
    env.reset(options={"row": 3, "budget_ms": 0.1})
    env.step([2, 1, 0])
    assert pixels(env.render(), rendering._LATE) > 200


@pytest.mark.parametrize(
    "picture",
    [RED / 255, RED[..., 0], Image.fromarray(RED).convert("P"), RED.repeat(300, 0), None],
    ids=["float", "grey", "palette", "tall", "none"],
)
def test_pictures_of_every_kind_are_drawn(picture):
    env = ConfigBanditEnv(
        TABLE,
        BudgetConfig(constraint="mean"),
        render_mode="rgb_array",
        inputs=lambda _: ("", picture),
    )
    env.reset(seed=0)
    env.step([0, 0, 0])
    assert env.render().shape == (520, 900, 3)


values = st.integers(0, 10**9) | st.floats(0, 1e6) | st.text(max_size=60)


@settings(max_examples=8)
@given(
    number=st.floats(0, 1e9, width=32),
    budget=st.floats(2**-20, 1e9, width=32),
    knobs=st.lists(st.lists(values, min_size=1, max_size=20, unique=True), min_size=1, max_size=14),
    text=st.text(max_size=400) | st.just("W" * 50 + " WWWW" * 40),
)
@example(number=0.0, budget=1.0, knobs=[[0]], text=";")  # reaches to the left of where it begins
def test_whatever_is_drawn_nothing_runs_over(number, budget, knobs, text):
    made = tuple(Knob(f"{i} {text}", tuple(row)) for i, row in enumerate(knobs))
    info = {"sample_id": "x" * 99, "budget_ms": budget}
    for who, value in (("", -1), ("oracle_", 0)):
        info |= {f"{who}accuracy": 0.5, f"{who}latency_ms": number}
        info[f"{who}violation"] = number > budget
        info[f"{who}configuration"] = {knob.name: knob.values[value] for knob in made}
    view = rendering.View(made, "ms", info, reward=-0.2, question=text)
    picture = view.image()
    # the margins stay empty, and a question does not reach the knobs
    for empty in (picture[:, :30], picture[:, 870:], picture[320:390, 314:342]):
        assert (empty == 255).all()
    blue = np.abs(picture[72:390, 500:].astype(int) - [0x25, 0x63, 0xA8]).max(-1) <= 3
    rows = blue.any(1).astype(int)
    assert (np.diff(rows, prepend=0) == 1).sum() >= len(made)  # the choice is never left out
    assert "Best" in view.words()


def test_the_built_in_profile_comes_with_its_questions_and_pictures():
    env = gymnasium.make(ID, render_mode="ansi")
    env.reset(options={"sample_id": "17", "budget_ms": 2.0})
    request, question, *_ = env.render().splitlines()
    assert request == "Sample 17, budget 2.00 ms"
    assert question == "Question: match? r2 c0 r6 c3"
    other = gymnasium.make(ID, render_mode="ansi", table=TABLE)  # its sample 17 is another
    other.reset(options={"sample_id": "17"})
    assert "Question" not in other.render()
    with_picture = gymnasium.make(ID, render_mode="rgb_array")
    with_picture.reset(options={"sample_id": "17"})
    colours = with_picture.render()[100:280, 100:240].reshape(-1, 3)
    assert (colours == [38, 38, 255]).all(1).sum() > 100  # blue digits, 0.15 of red and green


def test_without_a_mode_there_is_nothing_to_see():
    env = ConfigBanditEnv(TABLE)
    env.reset(seed=0)
    assert env.render() is None
    with input_error("render_mode"):
        ConfigBanditEnv(TABLE, render_mode="video")


def test_gymnasium_opens_a_window(monkeypatch, tmp_path):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pygame = pytest.importorskip("pygame")
    monkeypatch.setitem(ConfigBanditEnv.metadata, "render_fps", 1000)
    with pytest.warns(UserWarning, match="HumanRendering"):
        env = gymnasium.make(ID, table=TABLE, render_mode="human")
    env.reset(seed=0)
    assert pygame.display.get_surface().get_size() == (900, 520)
    env.step((0, 0, 0))
    env.close()


def test_gymnasium_checks_the_picture():
    check_env(gymnasium.make(ID, table=TABLE, render_mode="rgb_array").unwrapped)
