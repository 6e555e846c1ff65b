"""The elastic model, the scenes it is asked about, and the model behind the interface of adaptive
models."""

import itertools
from dataclasses import replace
from importlib import resources

import numpy as np
import polars as pl
import pytest
import torch
from helpers import close, identical, input_error
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from knobwise.profiling.measuring.adaptive_model import KNOBS, Request
from knobwise.testbeds.elastic import scenes
from knobwise.testbeds.elastic.adapter import (
    ElasticAdaptive,
    as_image,
    as_prompt,
    builtin_input,
    request_of,
)
from knobwise.testbeds.elastic.model import (
    ElasticVLM,
    cut_windows,
    tile_grid,
    window_coordinates,
)
from knobwise.testbeds.elastic.settings import Configuration, ElasticSize
from knobwise.testbeds.make.elastic import Trainee
from knobwise.testbeds.profiles import builtin_profile

TINY = ElasticSize(width=16, heads=2, blocks=5, experts=4, expert_width=8, max_top_k=3, stride=4)
SCENES = scenes.draw_samples(12, seed=1)
LARGE = max(SCENES, key=lambda scene: scene.image.size)


def test_answers_say_what_the_scene_shows():
    known = {pixels.tobytes(): label for pixels, label in zip(*scenes.load_digits(), strict=True)}
    names = {tuple(np.round(colour)): name for name, colour in scenes.COLOURS.items()}
    kinds = set()
    for image, question, answer, digits in scenes.draw_samples(200, seed=5):
        digit, colour = np.full((2, *digits.shape), "blank", object)
        for row, column in np.ndindex(digits.shape):
            cell = image[0, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            ink = cell.max(0)  # every colour is 1 somewhere
            if ink.any():
                digit[row, column] = str(known[ink.tobytes()])
                colour[row, column] = names[tuple(cell.max((1, 2)).round())]
        assert np.array_equal(np.where(digits == scenes.BLANK, "blank", digits), digit)
        kind, *places = question.split()
        kind = kind.removesuffix("?")
        kinds.add(kind)
        at = [int(place[1:]) for place in places]
        shown = colour if kind in ("colour", "row_colours", "match") else digit
        if kind in ("digit", "colour"):
            wanted = [shown[*at]]
        elif kind == "column":
            wanted = [*shown[:, at[0]]]
        elif len(at) == 1:
            wanted = [*shown[at[0]]]
            if kind == "largest":
                wanted = [max(filter(str.isdigit, wanted), default="blank")]
        else:
            wanted = [shown[*at[:2]], shown[*at[2:]]]
            x, y = (int(name) if name.isdigit() else 0 for name in wanted)
            alike = "same" if wanted[0] == wanted[1] else "other"
            bigger = ("same", "first", "second")[np.sign(x - y)]
            wanted.append({"match": alike, "sum": str(x + y), "compare": bigger}[kind])
        assert answer.split() == wanted
    assert kinds == set(scenes.QUESTIONS)


def test_samples_depend_on_seed_and_number_alone():
    again, other = (scenes.draw_samples(3, seed) for seed in (1, 2))
    np.testing.assert_equal(again, SCENES[:3])
    assert [s[1:3] for s in again] != [s[1:3] for s in other]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = ElasticVLM(TINY).eval()
    model.drop_order = (2, 1, 3)
    return model


@torch.inference_mode()
def whole(model, scene, setting):
    """Logits [1, 9, words] of a scene's answer in one pass, without a cache."""
    trainee = Trainee(TINY)
    trainee.model = model
    active = model.active_blocks(setting.num_active_blocks)
    return trainee.logits([scene], setting, active)[0]


def straight(model, scene, setting):
    request = request_of(scene)
    return model.generate(request.image, model.overview(request.image), request.question, setting)


@pytest.mark.parametrize("configuration", [(1, 1, 2), (3, 2, 4), (12, 3, 5)])
def test_cached_decoding_equals_uncached(model, configuration):
    setting = Configuration(*configuration)
    for scene in scenes.draw_samples(6, seed=3):
        words = straight(model, scene, setting).text.split()
        spoken = scene._replace(answer=" ".join(words[: scenes.ANSWER_TOKENS - 1]))
        likeliest = whole(model, spoken, setting)[0].argmax(-1).tolist()
        wanted = [*words, "<end>"][: scenes.ANSWER_TOKENS]
        assert [scenes.WORDS[token] for token in likeliest[: len(wanted)]] == wanted


def test_dropping_blocks_keeps_first_and_last_and_follows_the_order(model):
    assert [model.active_blocks(n) for n in (2, 3, 4, 5)] == [
        (0, 4),
        (0, 3, 4),
        (0, 1, 3, 4),
        (0, 1, 2, 3, 4),
    ]


@pytest.mark.parametrize("knob", KNOBS)
def test_every_knob_changes_the_computation(model, knob):
    work = []
    for value in (2, 3):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            setting = Configuration(6, 2, 4)._replace(**{knob: value})
            whole(model, LARGE, setting)
        work.append(counter.get_total_flops())
    assert work[1] > 1.1 * work[0]


def test_experts_run_on_the_tokens_that_chose_them_only(model):
    experts, x = model.blocks[0].experts, torch.randn(11, TINY.width)
    weight, chosen = experts.router(x).tanh().softmax(-1).topk(TINY.max_top_k, -1)
    share = torch.zeros(11, TINY.experts)
    share.scatter_(1, chosen[:, :2], (weight / weight.sum(-1, True))[:, :2])
    every = torch.nn.functional.silu(x @ experts.w_in) @ experts.w_out  # [experts, 11, width]
    wanted = torch.einsum("te,etw->tw", share, every)
    close(experts(x, 2), wanted, 1e-5)
    close(torch.cat([experts(row[None], 2) for row in x]), wanted, 1e-5)


@pytest.mark.parametrize("max_crops", [1, 3, 6, 12, 16])
def test_tiles_stay_under_the_cap_and_never_scale_up(max_crops):
    for rows, columns in itertools.product(range(2, 9), repeat=2):
        grid = tile_grid(rows, columns, max_crops)
        assert grid.down * grid.across <= max_crops
        assert (grid.height <= 8 * rows) & (grid.width <= 8 * columns)
    assert tile_grid(2, 2, max_crops)[:2] == (1, 1)  # a small image needs one tile whatever the cap
    assert tile_grid(8, 8, 16)[2:] == (64, 64)  # full resolution


def test_windows_come_in_the_order_of_their_coordinates():
    image = torch.zeros(1, 3, 32, 24)
    image[:, :, 8:16, 16:24] = 1  # the cell in row 1, column 2, alone
    grid = tile_grid(4, 3, 12)
    brightest = cut_windows(image, grid, 4).sum(-1).argmax()
    rows, columns = window_coordinates(4, 3, (grid,), 4)[brightest, :16].view(2, 8).tolist()
    assert (rows, columns) == ([0, 1, *[0] * 6], [0, 0, 1, *[0] * 5])


# -- as an adaptive model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped():
    return ElasticAdaptive()


@pytest.fixture
def tiny():
    return ElasticAdaptive(ElasticVLM(replace(TINY, blocks=4, max_crops=6)).eval(), "tiny")


def test_features_say_the_size_and_the_question_and_depend_on_no_knob(tiny):
    request = request_of(LARGE)
    width = tiny.model.size.width
    stage = tiny.first_stage(request)
    image, language = stage.features.values()
    assert (image.shape, language.shape) == ((2 * width,), (width,))
    # the definition: means of the overview's tokens and of the prompt's, and the grid-size token
    with torch.inference_mode():
        tokens = tiny.model.first_stage(request.image, tiny.model.overview(request.image))[0]
        words = tiny.model.words(request.question)[0].mean(0)
    close(tokens[1:].mean(0), image[:width], 1e-5)
    close(tokens[0], image[width:], 1e-6)
    close(words, language, 1e-6)
    tiny.answer([stage], {"max_crops": 1})
    np.testing.assert_equal(tiny.first_stage(request).features, stage.features)


def test_it_has_the_knobs_of_its_size(tiny):
    knobs = [(knob.name, knob.least, knob.default, knob.most) for knob in tiny.knobs]
    assert knobs == [*zip(KNOBS, (1, 1, 2), (6, 3, 4), (6, 3, 4), strict=True)]


@pytest.mark.parametrize("configuration", [(1, 1, 2), (3, 2, 3), (6, 3, 4)])
def test_going_on_from_the_first_stage_answers_as_going_straight_through(tiny, configuration):
    setting = Configuration(*configuration)
    stages = [tiny.first_stage(request_of(scene)) for scene in SCENES]
    wanted = [straight(tiny.model, scene, setting).text for scene in SCENES]
    for _ in range(2):  # what a first stage keeps is not used up
        assert [answer.text for answer in tiny.answer(stages, setting._asdict())] == wanted


def test_a_sample_of_the_built_in_profile_is_drawn_again(shipped):
    """The answers: tests/envs/readers/test_profiling_builtin.py."""
    table = builtin_profile()
    path = resources.files("knobwise.testbeds") / "data" / "builtin" / "samples.parquet"
    samples = pl.read_parquet(path)
    for row in range(0, table.num_samples, 100):
        question, picture = builtin_input(table.sample_ids[row])
        known = samples.row(row, named=True)
        assert (table.sample_ids[row], question) == (str(known["sample_id"]), known["question"])
        stage = shipped.first_stage(Request(picture.transpose(2, 0, 1), question))
        for name, block in stage.features.items():
            # another processor may round the last bit of a half otherwise
            np.testing.assert_allclose(block, table.features[name][row], atol=2e-3, rtol=2e-3)


def test_an_answer_says_what_it_cost(tiny):
    stage = tiny.first_stage(request_of(SCENES[0]))
    assert 0 < stage.extra_ms < stage.total_ms
    (answer,) = tiny.answer([stage], {"max_crops": 2, "top_k": 1, "num_active_blocks": 2})
    assert stage.total_ms - stage.extra_ms < answer.vision_ms < answer.prefill_ms <= answer.total_ms
    assert (answer.vision_tokens, answer.language_tokens) == (10 + 2 * 9, 6)
    assert 1 <= answer.output_tokens <= 9
    # a first stage that was kept costs nothing, and a fresh one all that it took
    long = replace(stage, total_ms=1e9, extra_ms=1.0)
    (fresh,), (kept,) = (tiny.answer([stage], {}) for stage in (long, replace(long, total_ms=1.0)))
    for took in (fresh.total_ms, fresh.prefill_ms, fresh.vision_ms):
        assert took > 0.9e9
    assert kept.total_ms < 0.9e9


def test_knobs_are_restored_whatever_happens(tiny):
    full = {"max_crops": 6, "top_k": 3, "num_active_blocks": 4}
    with tiny.set_knobs({"top_k": 1}):
        assert tiny.configuration == full | {"top_k": 1}  # what is not named has its default
        with pytest.raises(ZeroDivisionError), tiny.set_knobs({"num_active_blocks": 2}):
            assert 1 / (tiny.configuration["num_active_blocks"] - 2)
        assert tiny.configuration == full | {"top_k": 1}
    assert tiny.configuration == tiny.model.full._asdict() == full


def test_pictures_and_words_are_understood_and_answered_right(shipped):
    agree, right = [], []
    for scene in SCENES:
        request = request_of(scene)
        pixels = (scene.image[0].transpose(1, 2, 0) * 255).round().astype(np.uint8)
        picture = Image.fromarray(pixels)
        identical(as_prompt(request.question.numpy()), request.question)
        identical(as_image(scene.image.astype(float)), request.image)
        close(as_image(picture), scene.image, 0.5 / 255 + 1e-6)
        stages = [shipped.first_stage(r) for r in (Request(picture, scene.question), request)]
        first, second = shipped.answer(stages, {})
        agree.append(first.text == second.text)
        right.append(second.text == scene.answer)
        # a window at every pixel
        grid = tile_grid(*scene.digits.shape, 12)
        assert second.vision_tokens == 1 + 81 * (1 + grid.down * grid.across)
    assert np.mean(agree) > 0.8  # 256 shades each way may turn a close call
    assert np.mean(right) >= 0.75


SQUARE = torch.zeros(1, 3, 16, 16)


@pytest.mark.parametrize(
    ("image", "question", "fault"),
    [
        (torch.zeros(1, 3, 20, 16), "digit? r0 c0", "image"),
        (np.zeros((1, 1, 16, 16), np.float32), "digit? r0 c0", "image"),
        ("cat.jpg", "digit? r0 c0", "image"),
        (SQUARE, "what is this", "'what is this'"),
        (SQUARE, "", "question"),
        (SQUARE, torch.zeros(1, 5, dtype=torch.int64), "question"),
        (SQUARE, 1.5, "question"),
    ],
)
def test_what_the_model_cannot_take_is_refused(tiny, image, question, fault):
    with input_error(fault):
        tiny.first_stage(Request(image, question))
