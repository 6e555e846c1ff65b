"""The learned reward: its penalty, what it learns from, and that it reads demonstrations in their
order."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from helpers import close, input_error, small_beams

from knobwise.agents.selector.reward_model import Answered, RewardModel, recorded_answers
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import RewardModelConfig, SelectorConfig

TABLE, SCORER = small_beams(200)
ROWS, SEQUENCES = torch.arange(6), TABLE.pool[:6, :2]


def fresh():
    selector = Selector.fitted(SelectorConfig(width=4), TABLE.queries, TABLE.candidates)
    config = RewardModelConfig(width=16, members=3, epochs=4)
    return RewardModel(config, selector.mean, selector.scale)


def test_the_penalty_by_hand(monkeypatch):
    """Mean .5; deviations ±.1 and ±.3, so that the variance is .05."""
    probabilities = torch.tensor([[0.2, 0.7], [0.4, 0.7], [0.6, 0.7], [0.8, 0.7]])
    model = fresh()
    monkeypatch.setattr(model, "probabilities", lambda *_: probabilities)
    close(model.score(TABLE, ROWS, SEQUENCES)["vqa_correct"], [0.5 - 0.05**0.5, 0.7])


def test_members_are_computed_as_each_would_be_alone():
    model = fresh()
    every = model.probabilities(TABLE, ROWS, SEQUENCES)
    embeddings = TABLE.queries[ROWS], TABLE.candidates[SEQUENCES]
    query, items = ((x - model.mean) / model.scale for x in embeddings)
    for number, probabilities in enumerate(every):
        weights = {name: weight[number] for name, weight in model.weights.items()}
        model.network.load_state_dict(weights)
        close(probabilities, model.network(query, items, SEQUENCES >= 0).sigmoid().detach())
    assert every.std(0).min() > 0


def test_the_order_counts():
    """Where only the first demonstration decides, the reversed sequence has another answer, and it
    learns that."""
    model, rows, sequences = fresh(), torch.arange(100), TABLE.pool[:100, :2]
    first, second = TABLE.candidates[sequences][..., 0].unbind(1)
    model.learn(TABLE, Answered(rows, sequences, first), 150)
    apart = (first > 0) & (second == 0)
    assert apart.sum() > 10
    difference = model.probabilities(TABLE, rows, sequences)
    difference -= model.probabilities(TABLE, rows, sequences.flip(1))
    assert difference[:, apart].mean() > 0.8


def test_padding_changes_nothing():
    model, padded = fresh(), torch.nn.functional.pad(SEQUENCES, (0, 2), value=-1)
    wanted = model.probabilities(TABLE, ROWS, SEQUENCES)
    close(model.probabilities(TABLE, ROWS, padded), wanted)
    model.learn(TABLE, Answered(ROWS, SEQUENCES, torch.ones(6)), 1)
    model.learn(TABLE, Answered(ROWS, padded, torch.zeros(6)), 1)
    assert torch.equal(model.answered.sequences, torch.cat([padded, padded]))
    assert model.answered.right.tolist() == [1] * 6 + [0] * 6


def test_it_predicts_right_answers_of_queries_that_it_never_saw():
    split, model = TABLE.split(0.8, 0.1), fresh()
    model.learn(TABLE, recorded_answers(TABLE, split.train), 60)
    rows = split.test.repeat_interleave(6)
    sequences = TABLE.pool[rows].gather(1, TABLE.sequences[split.test].flatten(0, 1))
    right = SCORER(rows, sequences)["vqa_correct"]
    expected = model.probabilities(TABLE, rows, sequences).mean(0)
    assert expected[right > 0].mean() > expected[right == 0].mean() + 0.3


def test_it_learns_first_from_what_was_found_without_looking_at_the_answer():
    """Beams that were found with the answer in view are right more often than what a policy
    draws."""
    asked = torch.tensor([3, 7])
    rows, sequences, right = recorded_answers(TABLE, asked)
    assert rows.tolist() == [3] * 4 + [7] * 4
    wanted = TABLE.pool[rows].gather(1, TABLE.sequences[asked, 2:].flatten(0, 1))
    assert torch.equal(sequences, wanted)
    assert torch.equal(right, TABLE.fields["vqa_correct"][asked, 2:].flatten())


def test_each_true_call_is_answered_once_and_learned_from():
    model, rows, scorer = fresh(), torch.tensor([1, 4, 4]), Mock(wraps=SCORER)
    model.learn(TABLE, recorded_answers(TABLE, torch.arange(20)), 1)
    drawn = TABLE.pool[rows][:, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]])]
    predicted = model.probabilities(TABLE, rows.repeat_interleave(4), drawn.flatten(0, 1))
    metrics = model.correct(TABLE, rows, drawn, scorer)
    scorer.assert_called_once()
    queries, sequences = scorer.call_args.args
    assert torch.equal(queries, rows)
    most_disagreed = predicted.std(0, correction=0).view(3, 4).argmax(1)
    assert torch.equal(sequences, drawn[range(3), most_disagreed])
    assert len(model.answered.rows) == 80 + 3
    assert torch.equal(model.answered.sequences[-3:], sequences)
    right = SCORER(queries, sequences)["vqa_correct"].mean()
    assert metrics["Asked_Right"] == pytest.approx(float(right))


@pytest.mark.parametrize(("of_beams", "named"), [(torch.nan, "vqa_correct"), (1.0, "in view")])
def test_beams_without_right_and_wrong_are_refused(of_beams, named):
    right = torch.full((200, 6), torch.nan)
    right[:, :2] = of_beams
    fields = TABLE.fields | {"vqa_correct": right}
    with input_error(named):
        recorded_answers(replace(TABLE, fields=fields), torch.arange(20))
    del fields["vqa_correct"]
    with input_error("vqa_correct"):
        recorded_answers(replace(TABLE, fields=fields), torch.arange(20))
