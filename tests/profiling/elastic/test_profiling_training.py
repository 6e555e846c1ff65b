from dataclasses import replace

import pytest
import torch

from knobwise.profiling.elastic import training
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.settings import ElasticSize, TrainingConfig
from knobwise.profiling.elastic.training import calibrate, train

TINY = ElasticSize(width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=2)
SHORT = TrainingConfig(steps=6, batch_size=4)


@pytest.fixture(autouse=True)
def few_calibration_scenes(monkeypatch):
    monkeypatch.setattr(training, "calibrate", lambda model, seed: calibrate(model, seed, batches=1))


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(tmp_path, monkeypatch):
    whole = train(SHORT, TINY, tmp_path / "whole.pt")

    draw, calls = training._draw, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return draw(*args, **kwargs)

    monkeypatch.setattr(training, "_draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(SHORT, TINY, tmp_path / "parts.pt", save_every_s=0)
    assert torch.load(tmp_path / "parts.pt", weights_only=True)["step"] == 3
    parts = train(SHORT, TINY, tmp_path / "parts.pt")
    for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert whole.drop_order == parts.drop_order


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    train(replace(SHORT, steps=1), TINY, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="other settings"):
        train(replace(SHORT, steps=2), TINY, tmp_path / "state.pt")


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    model = ElasticVLM(TINY)
    config = TrainingConfig(steps=40, batch_size=16, learning_rate=1e-2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    losses = []
    for step in range(config.steps):
        loss = training._loss(model, config, step % 4)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_the_drop_order_names_every_middle_block_once():
    torch.manual_seed(0)
    order = calibrate(ElasticVLM(TINY).eval(), batches=1)
    assert sorted(order) == [1, 2]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": 0.0}, {"random_crops": 1.5}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"steps|learning_rate|random_crops"):
        TrainingConfig(**wrong)
