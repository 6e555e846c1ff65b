"""The in-context learner: what it sees, its file, and that the weights that come with knobwise do what they should."""

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from knobwise.common.errors import InputError
from knobwise.profiling.demonstrations import learner as module
from knobwise.profiling.demonstrations.canvases import VARIANTS, draw_bank, draw_queries
from knobwise.profiling.demonstrations.learner import WIDTH, Learner, LearnerConfig
from knobwise.profiling.demonstrations.scorers import LearnerScorer
from knobwise.profiling.demonstrations.tasks import builtin_learner


def tokens(n, shots, seed=0):
    generator = torch.Generator().manual_seed(seed)
    asked, shown = torch.randn(n, WIDTH, generator=generator), torch.randn(n, shots, WIDTH, generator=generator)
    return asked, shown, torch.randint(10, (n, shots), generator=generator)


def test_training_covers_zero_shot_too():
    learner = Learner()
    never, always = (LearnerConfig(batch_size=8, zero_shot=share, attributes=0) for share in (0.0, 1.0))
    module._loss(learner, never, 0).backward()
    assert learner.labels.weight.grad[:10].abs().sum() > 0
    learner.zero_grad()
    module._loss(learner, always, 0).backward()
    assert learner.labels.weight.grad[:10].abs().sum() == 0  # no label was shown
    assert learner.labels.weight.grad[10].abs().sum() > 0


def test_padding_changes_nothing_and_what_stands_in_it_is_not_seen():
    torch.manual_seed(0)
    learner = Learner().eval()
    asked, shown, labels = tokens(6, 4)
    labels[:3, 2:] = -1
    with torch.inference_mode():
        together = learner(asked, shown, labels)
        two, four = learner(asked[:3], shown[:3, :2], labels[:3, :2]), learner(asked[3:], shown[3:], labels[3:])
        none = learner(asked, shown, torch.full_like(labels, -1))
        empty = learner(asked, shown[:, :0], labels[:, :0])
        shown[:3, 2:] += 100
        assert torch.equal(learner(asked, shown, labels), together)
    torch.testing.assert_close(together, torch.cat([two, four]), rtol=0, atol=1e-5)
    torch.testing.assert_close(none, empty, rtol=0, atol=1e-5)
    assert (none - together).abs().max() > 0.1


def test_the_order_of_demonstrations_does_not_matter_but_their_labels_do():
    learner = Learner().eval()
    asked, shown, labels = tokens(5, 3)
    order = torch.tensor([2, 0, 1])
    with torch.inference_mode():
        one, same = learner(asked, shown, labels), learner(asked, shown[:, order], labels[:, order])
        other = learner(asked, shown, labels[:, order])
    torch.testing.assert_close(one, same, rtol=0, atol=1e-5)
    assert (one - other).abs().max() > 0.01


def test_a_saved_learner_is_the_same_but_for_half_precision(tmp_path):
    torch.manual_seed(0)
    learner = Learner()
    learner.training_s = 12.5
    learner.save(tmp_path / "learner.safetensors")
    again = Learner.load(tmp_path / "learner.safetensors")
    assert again.training_s == 12.5
    assert again.digest == learner.digest
    assert not again.training
    with torch.inference_mode():
        torch.testing.assert_close(again(*tokens(4, 2)), learner(*tokens(4, 2)), rtol=0, atol=0.01)
    with torch.no_grad():
        again.norm.bias += 0.01
    assert again.digest != learner.digest


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Learner.load(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("what?")
    with pytest.raises(InputError, match="not a learner"):
        Learner.load(tmp_path / "text.safetensors")


def test_the_learner_that_comes_with_knobwise_answers_by_its_demonstrations():
    """On digits that it was not trained on; one question each, two demonstrations."""
    bank = draw_bank(RandomState(1), 4000, True, VARIANTS["careless"])
    queries = draw_queries(RandomState(2), 400, True)
    scorer = LearnerScorer(builtin_learner(), queries, bank)
    one = np.flatnonzero(queries.questions[:, 1] < 0)
    right = queries.values[one, queries.questions[one, 0]]
    covers = (bank.question == queries.questions[one, :1]) & (bank.true_value == right[:, None])
    reliable, other = covers & ~bank.careless & (bank.value == bank.true_value), ~covers

    def accuracy(first, second, vote=False):
        shown = np.stack([first.argmax(1), other.argmax(1) if second is None else second], 1)
        rows = torch.from_numpy(one), torch.from_numpy(shown)
        return float((scorer.vote(*rows) if vote else scorer(*rows)["vqa_correct"]).mean())

    assert accuracy(reliable, None) > 0.96
    assert accuracy(other, np.full(len(one), -1)) < 0.2
    # it repeats what a careless annotator says, right or wrong
    wrong = covers & (bank.value != bank.true_value)
    assert accuracy(wrong, None) < 0.1
    # the values mean other labels for each query: without demonstrations it can only guess
    zero_shot = scorer(torch.from_numpy(one), torch.full((len(one), 1), -1))
    assert float(zero_shot["vqa_gt_prob"].mean()) == pytest.approx(0.1, abs=0.01)
