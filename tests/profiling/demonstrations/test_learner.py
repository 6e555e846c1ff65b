"""The in-context learner, what the weights that come with knobwise can do, and the scorer that
answers with them."""

import math

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from knobwise.profiling.demonstrations import scorers
from knobwise.profiling.demonstrations.canvases import (
    VARIANTS,
    Bank,
    Queries,
    draw_bank,
    draw_queries,
)
from knobwise.profiling.demonstrations.learner import WIDTH
from knobwise.profiling.demonstrations.scorers import LearnerScorer
from knobwise.profiling.demonstrations.tasks import builtin_learner

FIELDS = {"logprob_score", "vqa_gt_prob", "vqa_correct", "vqa_acc_score", "vqa_rel_score"}
QUERIES, BANK = (
    draw_queries(RandomState(0), 20, False),
    draw_bank(RandomState(1), 50, False, VARIANTS["careless"]),
)
LEARNER = builtin_learner()
SCORER = LearnerScorer(LEARNER, QUERIES, BANK)


def test_the_learner_that_comes_with_knobwise_answers_by_its_demonstrations():
    """On digits that it was not trained on; one question each, two demonstrations."""
    bank = draw_bank(RandomState(1), 4000, True, VARIANTS["careless"])
    queries = draw_queries(RandomState(2), 400, True)
    scorer = LearnerScorer(LEARNER, queries, bank)
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


def prompts(n, shots=4, seed=0):
    """Queries and demonstrations [n, shots], of every length from none on."""
    rng = np.random.default_rng(seed)
    demonstrations = np.stack([rng.permutation(len(BANK))[:shots] for _ in range(n)])
    demonstrations[np.arange(shots) >= np.arange(n)[:, None] % (shots + 1)] = -1
    return torch.from_numpy(rng.integers(len(QUERIES), size=n)), torch.from_numpy(demonstrations)


def by_hand(query, demonstrations):
    """ln P of each label, [10], for each question asked, and the right label."""
    answers = []
    shown = torch.zeros(1, len(demonstrations), WIDTH)
    labels = torch.zeros(1, len(demonstrations), dtype=torch.int64)
    for i, m in enumerate(demonstrations):
        shown[0, i] = LEARNER.see(torch.from_numpy(BANK.images[m]), torch.tensor(BANK.question[m]))
        labels[0, i] = int(QUERIES.labels[query, BANK.question[m], BANK.value[m]])
    for part in QUERIES.questions[query][QUERIES.questions[query] >= 0]:
        asked = LEARNER.see(torch.from_numpy(QUERIES.images[query]), torch.tensor(part))
        logits = LEARNER(asked[None], shown, labels)[0].tolist()
        total = math.log(sum(map(math.exp, logits)))
        right = QUERIES.labels[query, part, QUERIES.values[query, part]]
        answers.append(([x - total for x in logits], right))
    return answers


def test_scores_follow_from_the_learners_logits():
    queries, demonstrations = prompts(100)
    with torch.inference_mode():
        found = SCORER(queries, demonstrations)
    assert set(found) == FIELDS
    for i, (query, row) in enumerate(zip(queries.tolist(), demonstrations.tolist(), strict=True)):
        with torch.inference_mode():
            parts = by_hand(query, [m for m in row if m >= 0])
        right = [log_probs[label] for log_probs, label in parts]
        hits = [float(log_probs[label] == max(log_probs)) for log_probs, label in parts]
        wanted = {
            "logprob_score": sum(right),
            "vqa_gt_prob": math.exp(sum(right)),
            "vqa_acc_score": sum(hits) / len(hits),
            "vqa_correct": float(all(hits)),
            "vqa_rel_score": sum(math.exp(p[label] - max(p)) for p, label in parts) / len(parts),
        }
        assert {k: v[i].item() for k, v in found.items()} == pytest.approx(wanted, abs=1e-4)
    assert 0 < found["vqa_correct"].mean() < 1
    assert (found["vqa_acc_score"] == 0.5).any()


@pytest.mark.parametrize("chunk", [1, 7])
def test_neither_chunks_nor_order_nor_padding_change_scores(chunk, monkeypatch):
    queries, demonstrations = prompts(24)
    found = SCORER(queries, demonstrations)
    wider = torch.cat([demonstrations, torch.full((24, 2), -1)], 1).flip(0)
    monkeypatch.setattr(scorers, "CHUNK", chunk)
    other = SCORER(queries.flip(0), wider)
    for name, values in found.items():
        assert (values.shape, values.dtype) == ((24,), torch.float32)
        torch.testing.assert_close(other[name].flip(0), values, rtol=1e-4, atol=1e-5)


def test_the_same_question_has_the_same_scores_and_they_can_weigh_what_is_learnt():
    scores, again = SCORER(*prompts(8)), SCORER(*prompts(8))
    for name, values in scores.items():
        weight = torch.ones(8, requires_grad=True)
        (weight * values).sum().backward()  # tensors of inference mode could not be kept for this
        assert torch.equal(weight.grad, values)
        assert torch.equal(again[name], values)


def test_zero_shot_whatever_the_width_and_no_scores_without_rows():
    queries = torch.arange(20)
    narrow, wide = (SCORER(queries, torch.full((20, width), -1)) for width in (0, 3))
    torch.testing.assert_close(narrow, wide, rtol=1e-4, atol=1e-5)
    for nothing in (torch.full((20, 2), -1), torch.zeros(20, 0).long()):
        assert SCORER.vote(queries, nothing).sum() == 0
    none = torch.zeros(0).long(), torch.zeros(0, 2).long()
    assert {name: len(values) for name, values in SCORER(*none).items()} == dict.fromkeys(FIELDS, 0)
    assert SCORER.vote(*none).shape == (0,)


def test_votes_by_hand():
    """Items 0–3 answer question 0 with 4, 5, 5, 4; items 4, 5 question 1 with 4 and 5."""
    question, value = np.array([0, 0, 0, 0, 1, 1]), np.array([4, 5, 5, 4, 4, 5])
    bank = Bank(BANK.images[:6], question, np.zeros(6, int), np.zeros(6, bool), value, value)
    asked = np.array([[0, -1], [0, 1], [1, 0], [2, -1]])
    values = np.array([[5, 0, 0], [4, 5, 0], [4, 5, 0], [0, 0, 0]])
    queries = Queries(QUERIES.images[:4], values, asked, QUERIES.labels[:4])
    cases = [
        (0, [1], 1), (0, [0], 0),
        (0, [0, 1], 0),  # a tie: the first
        (0, [1, 0], 1), (0, [0, 1, 2], 1),
        (0, [1, 0, 3, 2], 1),  # two each: the first
        (0, [5, 4, 1], 1),  # of another question: no votes
        (0, [4, 5], 0),  # nobody votes
        (0, [], 0), (1, [0, 5], 1),
        (1, [0, 4], 0),  # one of its two questions is wrong
        (1, [0, 3], 0),  # nobody votes on the second
        (1, [4, 0, 5, 3], 0), (2, [5, 4, 3], 1), (3, [0, 1, 2, 3], 0),
    ]  # fmt: skip
    rows, shown, right = zip(*cases, strict=True)
    padded = torch.tensor([[*places, -1, -1, -1, -1][:4] for places in shown])
    votes = LearnerScorer(LEARNER, queries, bank).vote(torch.tensor(rows), padded)
    assert votes.tolist() == list(right)
