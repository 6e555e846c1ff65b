"""The elastic model, the scenes it is asked about, and the model behind the interface of adaptive
models."""

import itertools
from dataclasses import replace
from importlib import resources

import numpy as np
import polars as pl
import pytest
import torch
from helpers import input_error
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from knobwise.envs.readers.builtin import builtin_profile
from knobwise.profiling.elastic import scenes
from knobwise.profiling.elastic.adapter import (
    ElasticAdaptive,
    as_image,
    as_prompt,
    builtin_input,
    request_of,
)
from knobwise.profiling.elastic.model import (
    ElasticVLM,
    cut_windows,
    tile_grid,
    window_coordinates,
)
from knobwise.profiling.elastic.settings import Configuration, ElasticSize
from knobwise.profiling.measuring.adaptive_model import KNOBS, Request

TINY = ElasticSize(width=16, heads=2, blocks=5, experts=4, expert_width=8, max_top_k=3, stride=4)
SCENES = scenes.draw_samples(12, seed=1)
LARGE = max(SCENES, key=lambda scene: scene.image.size)


def test_answers_say_what_the_scene_shows():
    palette, colours = np.array(list(scenes.COLOURS.values())), np.array(list(scenes.COLOURS))
    known = {pixels.tobytes(): label for pixels, label in zip(*scenes.load_digits(), strict=True)}
    kinds = set()
    for image, question, answer, digits in scenes.draw_samples(200, seed=5):
        rows, columns = (side // 8 for side in image.shape[2:])
        cells = image.reshape(3, rows, 8, columns, 8)
        ink = np.moveaxis(cells.max(0), 2, 1)  # every colour is 1 somewhere
        names = [[str(known.get(cell.tobytes(), "blank")) for cell in row] for row in ink]
        brightest = cells.max((2, 4)).transpose(1, 2, 0)  # [rows, columns, rgb]
        nearest = colours[((brightest[:, :, None] - palette) ** 2).sum(-1).argmin(-1)]
        nearest = np.where(np.array(names) == "blank", "blank", nearest)
        assert np.where(digits == scenes.BLANK, "blank", digits.astype(str)).tolist() == names
        kind, *at = question.replace("r", "").replace("c", "").split()
        kind = question.split("?")[0]
        kinds.add(kind)
        first, second = [int(n) for n in at[:2]], [int(n) for n in at[2:]]
        shown = nearest if kind in ("colour", "row_colours", "match") else np.array(names)
        if kind in ("digit", "colour"):
            wanted = [shown[*first]]
        elif kind in ("row", "row_colours"):
            wanted = shown[first[0]].tolist()
        elif kind == "column":
            wanted = shown[:, first[0]].tolist()
        elif kind == "largest":
            seen = [int(n) for n in shown[first[0]] if n != "blank"]
            wanted = [str(max(seen)) if seen else "blank"]
        else:
            wanted = [shown[*first], shown[*second]]
            if kind == "match":
                wanted.append("same" if wanted[0] == wanted[1] else "other")
            else:
                x, y = (0 if n == "blank" else int(n) for n in wanted)
                bigger = ("same", "first", "second")[np.sign(x - y)]
                wanted.append(str(x + y) if kind == "sum" else bigger)
        assert answer.split() == wanted
    assert kinds == set(scenes.QUESTIONS)


def test_samples_depend_on_seed_and_number_alone():
    for drawn, again in zip(SCENES, scenes.draw_samples(3, seed=1), strict=False):
        assert np.array_equal(drawn.image, again.image)
        assert drawn[1:3] == again[1:3]
    assert [s[1:] for s in SCENES[:3]] != [s[1:] for s in scenes.draw_samples(3, seed=2)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = ElasticVLM(TINY).eval()
    model.drop_order = (2, 1, 3)
    return model


@torch.inference_mode()
def whole(model, request, answer, setting):
    """Logits [1, 9, words] of an answer [1, 9] in one pass, without a cache."""
    overview = model.overview(request.image)
    prefix = model.prefix(request.image, overview, request.question, setting.max_crops)
    slots = model.slots.weight[scenes.PROMPT_TOKENS : scenes.PROMPT_TOKENS + answer.shape[1] - 1]
    x, length = torch.cat((prefix, model.words(answer[:, :-1]) + slots), 1), prefix.shape[1]
    # the prefix sees all of itself and none of the answer; the answer sees the prefix and its own
    # past
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    mask[:length, :length] = True
    for i in model.active_blocks(setting.num_active_blocks):
        x, _ = model.blocks[i](x, setting.top_k, mask)
    return model.head(model.norm(x)[:, length - 1 :])


def straight(model, scene, setting):
    request = request_of(scene)
    overview = model.overview(request.image)
    return model.generate(request.image, overview, request.question, Configuration(*setting)).text


@pytest.mark.parametrize("configuration", [(1, 1, 2), (3, 2, 4), (12, 3, 5)])
def test_cached_decoding_equals_uncached(model, configuration):
    setting = Configuration(*configuration)
    for sample in scenes.draw_samples(6, seed=3):
        tokens = []
        while len(tokens) < scenes.ANSWER_TOKENS and scenes.END not in tokens:
            answer = torch.tensor([tokens + [scenes.FILLER] * (scenes.ANSWER_TOKENS - len(tokens))])
            logits = whole(model, request_of(sample), answer, setting)
            tokens.append(int(logits[0, len(tokens)].argmax()))
        text = " ".join(scenes.WORDS[token] for token in tokens if token != scenes.END)
        assert straight(model, sample, configuration) == text


def test_dropping_blocks_keeps_first_and_last_and_follows_the_order(model):
    assert [model.active_blocks(n) for n in (2, 3, 4, 5)] == [
        (0, 4),
        (0, 3, 4),
        (0, 1, 3, 4),
        (0, 1, 2, 3, 4),
    ]


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products as they are really run."""

    multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("knob", ["max_crops", "top_k", "num_active_blocks"])
def test_every_knob_changes_the_computation(model, knob):
    work = []
    for value in (2, 3):
        with Products() as counter, torch.no_grad():
            setting = Configuration(6, 2, 4)._replace(**{knob: value})
            answer = torch.full((1, scenes.ANSWER_TOKENS), scenes.FILLER)
            whole(model, request_of(LARGE), answer, setting)
        work.append(counter.multiplications)
    assert work[1] > 1.1 * work[0]


def test_experts_run_on_the_tokens_that_chose_them_only(model):
    experts, x = model.blocks[0].experts, torch.randn(11, TINY.width)
    weight, chosen = experts.router(x).tanh().softmax(-1).topk(TINY.max_top_k, -1)
    weight, chosen = (weight / weight.sum(-1, True))[:, :2], chosen[:, :2]
    silu = torch.nn.functional.silu
    every = torch.stack(
        [silu(x @ a) @ b for a, b in zip(experts.w_in, experts.w_out, strict=True)], 1
    )
    wanted = (
        every.gather(1, chosen[..., None].expand(-1, -1, TINY.width)) * weight[..., None]
    ).sum(1)
    assert torch.allclose(experts(x, 2), wanted, atol=1e-5)
    assert torch.allclose(torch.cat([experts(row[None], 2) for row in x]), wanted, atol=1e-5)


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
    torch.manual_seed(0)
    size = ElasticSize(
        width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=3, max_crops=6, stride=4
    )
    return ElasticAdaptive(ElasticVLM(size).eval(), "tiny")


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
    np.testing.assert_allclose(image[:width], tokens[1:].mean(0), atol=1e-5)
    np.testing.assert_allclose(image[width:], tokens[0], atol=1e-6)
    np.testing.assert_allclose(language, words, atol=1e-6)
    tiny.answer([stage], {"max_crops": 1})
    for name, block in tiny.first_stage(request).features.items():
        assert np.array_equal(block, stage.features[name])


def picture_of(scene):
    return Image.fromarray((scene.image[0].transpose(1, 2, 0) * 255).round().astype(np.uint8))


def test_it_has_the_knobs_of_its_size(tiny):
    assert [(k.name, k.least, k.most) for k in tiny.knobs] == [
        *zip(KNOBS, (1, 1, 2), (6, 3, 4), strict=True)
    ]
    assert [k.default for k in tiny.knobs] == [6, 3, 4]


@pytest.mark.parametrize("configuration", [(1, 1, 2), (3, 2, 3), (6, 3, 4)])
def test_going_on_from_the_first_stage_answers_as_going_straight_through(tiny, configuration):
    setting = dict(zip(KNOBS, configuration, strict=True))
    stages = [tiny.first_stage(request_of(scene)) for scene in SCENES]
    answers = tiny.answer(stages, setting)
    wanted = [straight(tiny.model, scene, configuration) for scene in SCENES]
    assert [a.text for a in answers] == wanted
    again = tiny.answer(stages, setting)  # what a first stage keeps is not used up
    assert [a.text for a in again] == [a.text for a in answers]


def test_a_sample_of_the_built_in_profile_is_drawn_again(shipped):
    table = builtin_profile()
    path = resources.files("knobwise.envs") / "data" / "builtin" / "samples.parquet"
    best = int(table.accuracy.mean(0).argmax())
    agree = []
    for row in range(0, table.num_samples, 100):
        question, picture = builtin_input(table.sample_ids[row])
        sample = pl.read_parquet(path).row(row, named=True)
        assert (table.sample_ids[row], question) == (str(sample["sample_id"]), sample["question"])
        assert picture.shape == (sample["rows"] * scenes.CELL, sample["columns"] * scenes.CELL, 3)
        stage = shipped.first_stage(Request(picture.transpose(2, 0, 1), question))
        for name, block in stage.features.items():
            # another processor may round the last bit of a half otherwise
            assert np.allclose(block, table.features[name][row], atol=2e-3, rtol=2e-3)
        text = shipped.answer([stage], table.configuration(best))[0].text
        agree.append((text == sample["answer"]) == bool(table.accuracy[row, best]))
    assert np.mean(agree) > 0.9


def test_an_answer_says_what_it_cost(tiny):
    stage = tiny.first_stage(request_of(SCENES[0]))
    assert 0 < stage.extra_ms < stage.total_ms
    (answer,) = tiny.answer([stage], {"max_crops": 2, "top_k": 1, "num_active_blocks": 2})
    assert stage.total_ms - stage.extra_ms < answer.vision_ms < answer.prefill_ms <= answer.total_ms
    rows, columns = (side // 8 for side in SCENES[0].image.shape[2:])
    assert answer.vision_tokens == 10 + 9 * (1 if max(rows, columns) <= 2 else 2)
    assert answer.language_tokens == 6
    assert 1 <= answer.output_tokens <= 9
    # a first stage that was kept costs nothing, and a fresh one all that it took
    long = replace(stage, total_ms=1000.0, extra_ms=1.0)
    (fresh,), (kept,) = (tiny.answer([stage], {}) for stage in (long, replace(long, total_ms=1.0)))
    for took in (fresh.total_ms, fresh.prefill_ms, fresh.vision_ms):
        assert 999 < took < 1999
    assert kept.total_ms < 999


def test_pixels_of_another_type_are_answered_alike(tiny):
    request = request_of(SCENES[0])
    first, other = (
        tiny.first_stage(r) for r in (request, Request(request.image.double(), request.question))
    )
    assert all(
        np.array_equal(first.features[name], block) for name, block in other.features.items()
    )
    assert tiny.answer([first], {})[0].text == tiny.answer([other], {})[0].text


def test_knobs_are_restored_whatever_happens(tiny):
    def values():
        return tuple(tiny.configuration.values())

    with tiny.set_knobs({"top_k": 1}):
        assert values() == (6, 1, 4)  # what is not named has its default
        with pytest.raises(ZeroDivisionError), tiny.set_knobs({"num_active_blocks": 2}):
            assert 1 / (tiny.configuration["num_active_blocks"] - 2)
        assert values() == (6, 1, 4)
    assert values() == tiny.model.full == (6, 3, 4)


def test_pictures_and_words_are_understood(shipped):
    agree = []
    for scene in SCENES:
        picture, request = picture_of(scene), request_of(scene)
        assert torch.equal(as_prompt(request.question.numpy()), request.question)
        assert torch.allclose(as_image(picture), as_image(scene.image), atol=0.5 / 255 + 1e-6)
        stages = [shipped.first_stage(r) for r in (Request(picture, scene.question), request)]
        first, second = shipped.answer(stages, {})
        agree.append(first.text == second.text)
    assert np.mean(agree) > 0.8  # 256 shades each way may turn a close call


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


def test_the_shipped_model_is_right_on_most_scenes_at_the_full_setting(shipped):
    stages = [shipped.first_stage(request_of(scene)) for scene in SCENES]
    full = shipped.model.full._asdict()
    answers = shipped.answer(stages, full)
    right = [answer.text == scene.answer for answer, scene in zip(answers, SCENES, strict=True)]
    assert np.mean(right) >= 0.75
    # a window at every pixel
    grid = tile_grid(*SCENES[0].digits.shape, full["max_crops"])
    assert answers[0].vision_tokens == 1 + 81 * (1 + grid.down * grid.across)
