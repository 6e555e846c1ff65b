"""The learned reward: its penalty, what it learns from, and that it reads demonstrations in their
order."""

from dataclasses import replace

import pytest
import torch
from helpers import small_beams

from knobwise.agents.selector.reward_model import Answered, RewardModel, recorded_answers
from knobwise.agents.selector.selector import Selector
from knobwise.agents.selector.settings import RewardModelConfig, SelectorConfig
from knobwise.common.errors import InputError

TINY = RewardModelConfig(width=16, members=3, epochs=4)


def fresh(table, config=TINY):
    torch.manual_seed(0)
    selector = Selector.fitted(SelectorConfig(width=4), table.queries, table.candidates)
    return RewardModel(config, selector.mean, selector.scale)


def test_the_penalty_by_hand(monkeypatch):
    """Mean .5; deviations ±.1 and ±.3, so that the variance is .05."""
    probabilities = torch.tensor([[0.2, 0.7], [0.4, 0.7], [0.6, 0.7], [0.8, 0.7]])
    table, _ = small_beams()
    model = fresh(table)
    monkeypatch.setattr(model, "probabilities", lambda *_: probabilities)
    rows = torch.arange(2)
    scored = model.score(table, rows, table.pool[rows, :2])["vqa_correct"]
    torch.testing.assert_close(scored, torch.tensor([0.5 - 0.05**0.5, 0.7]))


def test_members_are_computed_as_each_would_be_alone():
    table, _ = small_beams()
    model = fresh(table)
    rows, sequences = torch.arange(6), table.pool[:6, :2]
    every = model.probabilities(table, rows, sequences)
    query, items = (
        (x - model.mean) / model.scale for x in (table.queries[rows], table.candidates[sequences])
    )
    for number in range(TINY.members):
        model.network.load_state_dict(
            {name: weight[number] for name, weight in model.weights.items()}
        )
        alone = model.network.eval()(query, items, sequences >= 0).sigmoid()
        torch.testing.assert_close(every[number], alone)
    assert every.std(0).min() > 0


def test_the_order_counts():
    """Where only the first demonstration decides, the reversed sequence has another answer, and it
    learns that."""
    table, _ = small_beams(100)
    model, rows, sequences = fresh(table), torch.arange(100), table.pool[:, :2]
    first, second = table.candidates[sequences][..., 0].unbind(1)
    model.learn(table, Answered(rows, sequences, first), 150)
    apart = (first > 0) & (second == 0)
    assert apart.sum() > 10
    expected, reversed_ = (
        model.probabilities(table, rows, x).mean(0)[apart] for x in (sequences, sequences.flip(1))
    )
    assert (expected - reversed_).mean() > 0.8


def test_padding_changes_nothing():
    table, _ = small_beams()
    model, rows, sequences = fresh(table), torch.arange(6), table.pool[:6, :2]
    padded = torch.nn.functional.pad(sequences, (0, 2), value=-1)
    torch.testing.assert_close(
        model.probabilities(table, rows, padded), model.probabilities(table, rows, sequences)
    )
    model.learn(table, Answered(rows, sequences, torch.ones(6)), 1)
    model.learn(table, Answered(rows, padded, torch.zeros(6)), 1)
    longer = model.answered
    assert longer.sequences.shape == (12, 4)
    assert longer.sequences[:6, 2:].eq(-1).all()
    assert longer.right.tolist() == [1] * 6 + [0] * 6


def test_it_predicts_right_answers_of_queries_that_it_never_saw():
    table, scorer = small_beams(200)
    split = table.split(0.8, 0.1)
    model = fresh(table)
    model.learn(table, recorded_answers(table, split.train), 60)
    rows = split.test.repeat_interleave(6)
    sequences = table.pool[rows].gather(1, table.sequences[split.test].flatten(0, 1))
    right = scorer(rows, sequences)["vqa_correct"]
    expected = model.probabilities(table, rows, sequences).mean(0)
    assert expected[right > 0].mean() > expected[right == 0].mean() + 0.3


def test_it_learns_first_from_what_was_found_without_looking_at_the_answer():
    """Beams that were found with the answer in view are right more often than what a policy
    draws."""
    table, _ = small_beams(20)
    rows = torch.tensor([3, 7])
    answered = recorded_answers(table, rows)
    assert answered.rows.tolist() == [3] * 4 + [7] * 4
    assert torch.equal(
        answered.sequences,
        table.pool[answered.rows].gather(1, table.sequences[rows, 2:].flatten(0, 1)),
    )
    assert torch.equal(answered.right, table.fields["vqa_correct"][rows, 2:].flatten())


def test_each_true_call_is_answered_once_and_learned_from():
    table, scorer = small_beams(20)
    model, rows, asked = fresh(table), torch.tensor([1, 4, 4]), []
    model.learn(table, recorded_answers(table, torch.arange(20)), 1)
    drawn = table.pool[rows][:, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4]])]
    predicted = model.probabilities(table, rows.repeat_interleave(4), drawn.flatten(0, 1))

    def answer(*inputs):
        asked.append(inputs)
        return scorer(*inputs)

    metrics = model.correct(table, rows, drawn, answer)
    ((queries, sequences),) = asked
    assert torch.equal(queries, rows)
    assert len(model.answered.rows) == 80 + 3
    assert torch.equal(model.answered.sequences[-3:], sequences)
    right = scorer(queries, sequences)["vqa_correct"].mean()
    assert metrics["Asked_Right"] == pytest.approx(float(right))
    most_disagreed = predicted.std(0, correction=0).view(3, 4).argmax(1)
    assert torch.equal(sequences, drawn[torch.arange(3), most_disagreed])


def test_beams_without_right_and_wrong_are_refused():
    table, _ = small_beams(20)
    scores = {name: values for name, values in table.fields.items() if name != "vqa_correct"}
    unknown = table.fields | {"vqa_correct": torch.full((20, 6), torch.nan)}
    for fields in (scores, unknown):
        with pytest.raises(InputError, match="vqa_correct"):
            recorded_answers(replace(table, fields=fields), torch.arange(20))
    of_beams = table.fields["vqa_correct"].clone()
    of_beams[:, 2:] = torch.nan
    fields = table.fields | {"vqa_correct": of_beams}
    with pytest.raises(InputError, match="in view"):
        recorded_answers(replace(table, fields=fields), torch.arange(20))
