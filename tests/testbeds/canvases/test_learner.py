"""The in-context learner, what the weights that come with knobwise can do, and the scorer that
answers with them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.random import RandomState

from knobwise.testbeds.canvases import scorer as learner_scorer
from knobwise.testbeds.canvases.canvases import VARIANTS, draw_bank, draw_queries
from knobwise.testbeds.canvases.scorer import LearnerScorer
from knobwise.testbeds.canvases.task import builtin_learner

QUERIES = draw_queries(RandomState(0), 20, False)
BANK = draw_bank(RandomState(1), 50, False, VARIANTS["careless"])
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
    reliable = covers & ~bank.careless & (bank.value == bank.true_value)
    wrong = covers & (bank.value != bank.true_value)
    other, none = (~covers).argmax(1), np.full(len(one), -1)

    def mean(field, first, second):
        shown = torch.from_numpy(np.stack([first, second], 1))
        return float(scorer(torch.from_numpy(one), shown)[field].mean())

    assert mean("vqa_correct", reliable.argmax(1), other) > 0.96
    assert mean("vqa_correct", other, none) < 0.2
    # it repeats what a careless annotator says, right or wrong
    assert mean("vqa_correct", wrong.argmax(1), other) < 0.1
    # the values mean other labels for each query: without demonstrations it can only guess
    assert mean("vqa_gt_prob", none, none) == pytest.approx(0.1, abs=0.01)


def prompts(n):
    """Queries and demonstrations [n, 4], of every length from none on."""
    rng = np.random.default_rng(0)
    demonstrations = np.stack([rng.permutation(len(BANK))[:4] for _ in range(n)])
    demonstrations[np.arange(4) >= np.arange(n)[:, None] % 5] = -1
    return torch.from_numpy(rng.integers(len(QUERIES), size=n)), torch.from_numpy(demonstrations)


def by_hand(query, row):
    """ln P of the right and of the likeliest label, for each question asked."""
    shown = row[row >= 0].numpy()
    seen = LEARNER.see(torch.from_numpy(BANK.images[shown]), torch.from_numpy(BANK.question[shown]))
    labels = torch.from_numpy(QUERIES.labels[query, BANK.question[shown], BANK.value[shown]])
    for part in QUERIES.questions[query]:
        if part >= 0:
            asked = LEARNER.see(torch.from_numpy(QUERIES.images[query]), torch.tensor(part))
            log_probs = LEARNER(asked[None], seen[None], labels[None])[0].log_softmax(0)
            right = QUERIES.labels[query, part, QUERIES.values[query, part]]
            yield log_probs[right], log_probs.max()


@torch.inference_mode()
def test_scores_follow_from_the_learners_logits():
    queries, demonstrations = prompts(100)
    found = SCORER(queries, demonstrations)
    for i, query in enumerate(queries.tolist()):
        right, likeliest = torch.tensor([*by_hand(query, demonstrations[i])]).T
        hits = (right == likeliest).float()
        wanted = {
            "logprob_score": right.sum(),
            "vqa_gt_prob": right.sum().exp(),
            "vqa_acc_score": hits.mean(),
            "vqa_correct": hits.prod(),
            "vqa_rel_score": (right - likeliest).exp().mean(),
        }
        scores = {name: values[i] for name, values in found.items()}
        torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-4)
    assert 0 < found["vqa_correct"].mean() < 1
    assert (found["vqa_acc_score"] == 0.5).any()


@pytest.mark.parametrize("chunk", [1, 7])
def test_neither_chunks_nor_order_nor_padding_change_scores(chunk, monkeypatch):
    queries, demonstrations = prompts(24)
    found = SCORER(queries, demonstrations)
    wider = torch.cat([demonstrations, torch.full((24, 2), -1)], 1).flip(0)
    monkeypatch.setattr(learner_scorer, "CHUNK", chunk)
    for name, values in SCORER(queries.flip(0), wider).items():
        assert (values.shape, values.dtype) == ((24,), torch.float32)
        torch.testing.assert_close(found[name].flip(0), values, rtol=1e-4, atol=1e-5)


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
    assert [len(values) for values in (*SCORER(*none).values(), SCORER.vote(*none))] == [0] * 6


def test_votes_by_hand():
    """Items 0–3 answer question 0 with 4, 5, 5, 4; items 4, 5 question 1 with 4 and 5."""
    question, value = np.array([0, 0, 0, 0, 1, 1]), np.array([4, 5, 5, 4, 4, 5])
    bank = replace(BANK, images=BANK.images[:6], question=question, value=value)
    asked = np.array([[0, -1], [0, 1], [1, 0]])
    values = np.array([[5, 0, 0], [4, 5, 0], [4, 5, 0]])
    queries = replace(QUERIES, images=QUERIES.images[:3], values=values, questions=asked)
    cases = [
        (0, [0, 1], 0),  # a tie: the first
        (0, [1, 0], 1), (0, [0, 1, 2], 1),
        (0, [1, 0, 3, 2], 1),  # two each: the first
        (0, [5, 4, 1], 1),  # of another question: no votes
        (0, [5], 0),  # nobody votes
        (0, [], 0), (1, [0, 5], 1),
        (1, [0, 4], 0),  # one of its two questions is wrong
        (1, [0, 3], 0),  # nobody votes on the second
        (2, [5, 4, 3], 1),
    ]  # fmt: skip
    rows, shown, right = zip(*cases, strict=True)
    padded = torch.tensor([[*places, -1, -1, -1, -1][:4] for places in shown])
    votes = LearnerScorer(LEARNER, queries, bank).vote(torch.tensor(rows), padded)
    assert votes.tolist() == list(right)
