"""The training of the elastic model and of the in-context learner: from scratch, resumed, refused."""

import pytest
import torch

from knobwise.profiling.demonstrations import learner
from knobwise.profiling.demonstrations.learner import Learner, LearnerConfig, train_learner
from knobwise.profiling.elastic import training
from knobwise.profiling.elastic.model import ElasticVLM
from knobwise.profiling.elastic.settings import ElasticSize, TrainingConfig
from knobwise.profiling.elastic.training import calibrate, train

TINY = ElasticSize(width=16, heads=2, blocks=4, experts=4, expert_width=8, max_top_k=2)


def train_elastic(state, steps=6, **more):
    return train(TrainingConfig(steps=steps, batch_size=4), TINY, state, **more)


def train_a_learner(state, steps=6, **more):
    return train_learner(LearnerConfig(steps=steps, batch_size=4), state, **more)


@pytest.fixture(params=[(training, train_elastic), (learner, train_a_learner)], ids=["elastic", "learner"])
def made(request, monkeypatch):
    monkeypatch.setattr(training, "calibrate", lambda model, seed: calibrate(model, seed, batches=1))
    return request.param


def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(made, tmp_path, monkeypatch):
    module, trained = made
    whole = trained(tmp_path / "whole.pt")
    loss, calls = module._loss, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(*args)

    monkeypatch.setattr(module, "_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts.pt", save_every_s=0)
    assert torch.load(tmp_path / "parts.pt", weights_only=True)["step"] == 3
    parts = trained(tmp_path / "parts.pt")
    for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for name in ("digest", "drop_order"):
        assert getattr(whole, name, None) == getattr(parts, name, None)


def test_a_checkpoint_of_other_settings_is_refused_and_the_global_generator_left_alone(made, tmp_path):
    _, trained = made
    torch.manual_seed(3)
    before = torch.get_rng_state()
    trained(tmp_path / "state.pt", steps=1)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="other settings"):
        trained(tmp_path / "state.pt", steps=2)


@pytest.mark.parametrize(
    ("module", "model", "config", "batches", "steps", "learning_rate"),
    [
        (training, lambda: ElasticVLM(TINY), TrainingConfig(steps=40, batch_size=16), 4, 40, 1e-2),
        (learner, Learner, LearnerConfig(batch_size=32), 3, 60, 3e-3),
    ],
)
def test_training_lowers_the_loss(module, model, config, batches, steps, learning_rate):
    torch.manual_seed(0)
    model = model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(steps):
        loss = module._loss(model, config, step % batches)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    few = 4 if module is training else 6
    assert sum(losses[-few:]) < 0.7 * sum(losses[:few])


def test_the_drop_order_names_every_middle_block_once():
    torch.manual_seed(0)
    assert sorted(calibrate(ElasticVLM(TINY).eval(), batches=1)) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        *((TrainingConfig, wrong) for wrong in ({"steps": 0}, {"learning_rate": 0.0}, {"random_crops": 1.5})),
        *((LearnerConfig, wrong) for wrong in ({"steps": 0}, {"learning_rate": 0.0}, {"covered": 1.5})),
        *((LearnerConfig, wrong) for wrong in ({"max_shots": 0}, {"zero_shot": -0.1})),
    ],
)
def test_impossible_settings_are_refused(settings, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        settings(**wrong)
