"""Training of the elastic model: its losses by hand, and that a stopped training ends where another
one does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import identical, input_error

from knobwise.testbeds.elastic import scenes
from knobwise.testbeds.elastic.adapter import ElasticAdaptive, request_of
from knobwise.testbeds.elastic.model import read_model
from knobwise.testbeds.elastic.settings import Configuration, ElasticSize
from knobwise.testbeds.make import elastic as training
from knobwise.testbeds.make.elastic import Recipe, Trainee

TINY = ElasticSize(width=8, heads=2, blocks=4, experts=4, expert_width=4, max_top_k=2, max_crops=4)
SHORT = Recipe(steps=(6, 2, 2), batch_sizes=(4, 4, 2))


def batch(questions=("digit",), count=3, largest=3):
    rng = np.random.default_rng(0)
    return training.draw_batch(rng, count, questions, largest, augmented=False)


@pytest.fixture
def trainee():
    return Trainee(TINY)


def test_training_and_profile_share_no_digit():
    train, held_out = (scenes.load_digits(held_out=part).images for part in (False, True))
    assert len(train) + len(held_out) == 1797
    # scikit-learn's images hold no image twice
    assert not {image.tobytes() for image in train} & {image.tobytes() for image in held_out}


def test_recipe_goes_from_coarse_to_fine_windows():
    recipe = Recipe(steps=(3, 2, 1))
    assert [training.STRIDES[recipe.phase(step)] for step in range(6)] == [4, 4, 4, 2, 2, 1]
    long = Recipe(steps=(1000, 500, 500))
    rates = [long.rate(step) / training.LEARNING_RATE for step in (0, 1000, 2000)]
    assert rates == pytest.approx([0.01, 0.515, 0.03])  # 1000: halfway down the cosine


def test_answers_are_closed_and_filled_up():
    (scene,) = batch(("sum",), 1)
    words = [scenes.WORDS[token] for token in training.answer_tokens(scene).tolist()]
    assert words == [*scene.answer.split(), "<end>", *["·"] * 5]


def test_balance_is_one_when_tokens_spread_evenly(trainee):
    experts = trainee.model.blocks[0].experts
    with torch.no_grad():
        experts.router.weight.zero_()
    experts(torch.randn(12, TINY.width), 1)
    # all logits are 0: equal shares, whichever expert topk takes
    assert trainee.balance[0].item() == pytest.approx(1.0)


@pytest.mark.parametrize("stride", training.STRIDES)
def test_digits_are_read_from_the_windows_that_show_one_cell(stride):
    """States that hold the pixels of their window are told apart by a head that compares pixels."""
    exact = Trainee(replace(TINY, width=192, heads=1, stride=stride))
    drawn = batch(largest=2)
    model = exact.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.stem.weight.copy_(torch.eye(192))
    images = torch.from_numpy(np.concatenate([scene.image for scene in drawn]))
    model.norm = torch.nn.Identity()
    _, states = exact.logits(drawn, Configuration(4, 2, 4), active=())
    read = []
    exact.digit_head = torch.nn.Identity()
    exact.digit_head.register_forward_hook(lambda module, x, cells: read.append(cells))
    exact._digit_loss(drawn, states, 4)
    rows, columns = drawn[0].digits.shape
    pixels = images.view(3, 3, rows, 8, columns, 8).permute(0, 2, 4, 1, 3, 5)
    identical(read[0], pixels.flatten(3))


def test_no_digit_is_asked_for_where_tiles_are_scaled_down(trainee):
    rng = np.random.default_rng(3)
    drawn = [training.draw_scene(rng, 6, 6, "digit", scenes.load_digits()) for _ in range(2)]
    assert trainee._digit_loss(drawn, torch.zeros(2, 100, TINY.width), 1) == 0


def test_a_stopped_training_ends_where_another_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CALIBRATION_BATCHES", 1)
    whole = training.train(SHORT, TINY, tmp_path / "whole.pt")
    loss_at = training.loss_at

    def stopping(trainee, recipe, step):
        if step == 7:
            raise KeyboardInterrupt
        return loss_at(trainee, recipe, step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "SAVE_EVERY_S", 0.0)
        patch.setattr(training, "loss_at", stopping)
        with pytest.raises(KeyboardInterrupt):
            training.train(SHORT, TINY, tmp_path / "half.pt")
    resumed = training.train(SHORT, TINY, tmp_path / "half.pt")
    identical(resumed.state_dict(), whole.state_dict())
    assert resumed.model.drop_order == whole.model.drop_order
    assert set(resumed.model.drop_order) == {1, 2}
    with input_error("half"):
        training.train(replace(SHORT, steps=(6, 2, 3)), TINY, tmp_path / "half.pt")


def test_the_command_writes_weights_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "ElasticSize", lambda: TINY)
    monkeypatch.setattr(training, "CALIBRATION_BATCHES", 1)
    monkeypatch.setattr(training, "Recipe", lambda: Recipe(steps=(1, 1, 1)))
    out = tmp_path / "model.safetensors"
    monkeypatch.setattr("sys.argv", ["training", "--out", str(out)])
    training.main()
    model = read_model(out)
    assert model.size == TINY
    assert all(weight.isfinite().all() for weight in model.parameters())


def accuracy(model, drawn):
    """The share of scenes that a model answers right at its full setting."""
    requests = [request_of(scene) for scene in drawn]
    answers = [
        model.generate(request.image, model.overview(request.image), request.question, model.full)
        for request in requests
    ]
    return np.mean(
        [answer.text == scene.answer for answer, scene in zip(answers, drawn, strict=True)]
    )


@pytest.mark.campaign
def test_a_small_training_reaches_the_shipped_model_where_it_is_easy(tmp_path, monkeypatch):
    """Cells of scenes of up to 3 × 3, after 300 steps: to 5 points. A minute and a half; the
    training of the shipped model takes an hour."""
    kinds = ("digit", "colour")
    draw_batch = training.draw_batch

    def small(rng, count, questions, largest, augmented):
        return draw_batch(rng, count, questions, min(largest, 3), augmented)

    monkeypatch.setattr(training, "draw_batch", small)
    monkeypatch.setattr(training, "LOOK_UPS", kinds)
    monkeypatch.setattr(training, "QUESTIONS", kinds)
    monkeypatch.setattr(training, "CALIBRATION_BATCHES", 1)
    recipe = Recipe(steps=(300, 0, 0))
    trained = training.train(recipe, ElasticSize(stride=4), tmp_path / "state.pt").model
    rng, digits = np.random.default_rng(7), scenes.load_digits()
    drawn = [
        scenes.draw_scene(rng, *rng.integers(2, 4, size=2).tolist(), kind, digits)
        for kind in kinds * 150
    ]
    with torch.inference_mode():
        assert accuracy(trained, drawn) > accuracy(ElasticAdaptive().model, drawn) - 0.05
