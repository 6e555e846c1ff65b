"""The scorer of language models, on a tiny random Llama made here without any download."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from commands import launch, mistake, read_json, refused, words_of
from helpers import close
from tiny_models import rows, tiny_llama

from knobwise.agents.training.checkpoint import load_checkpoint
from knobwise.envs.demonstrations.beam_table import BeamTable, bank_rows
from knobwise.envs.demonstrations.settings import METHODS
from knobwise.profiling.huggingface.text_scorer import TextScorer
from knobwise.profiling.measuring.questions import VQAData, VQAItem, read_vqa_data

CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def item(name, question, *answers):
    return VQAItem(name, None, question, answers, question)


BANK = (item("a", "One plus one?", "two"), item("b", "Two plus two?", "four"))
QUERIES = (item("c", "One plus two?", "three", "three", "3"), item("d", "Four plus one?", "five"))
DATA = VQAData(QUERIES, BANK)
PROMPTS = [(0, [0, 1]), (0, [1, 0]), (1, []), (0, [1]), (1, [0, 1])]


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


@torch.no_grad()
def by_hand(model, tokenizer, text, answer):
    """ln P of the tokens of an answer after a text, one pass for each."""
    ids, total = tokens_of(tokenizer, text), 0.0
    for token in tokens_of(tokenizer, answer)[0]:
        total += float(model(ids).logits[0, -1].log_softmax(-1)[token])
        ids = torch.cat([ids, token.view(1, 1)], 1)
    return total


def test_likelihoods_are_those_of_the_whole_text(llama):
    scores = TextScorer(*llama, DATA)(*rows(PROMPTS))
    two, four = "Question: One plus one?\nAnswer: two\n", "Question: Two plus two?\nAnswer: four\n"
    texts = [two + four, four + two, "", four, two + four]
    for text, (query, _), found in zip(texts, PROMPTS, scores["logprob_score"], strict=True):
        asked = f"{text}Question: {QUERIES[query].question}\nAnswer:"
        wanted = by_hand(*llama, asked, f" {QUERIES[query].answer}\n")
        assert float(found) == pytest.approx(wanted, abs=1e-3)
    close(scores["vqa_gt_prob"], scores["logprob_score"].exp())
    # neither batch nor padding nor order matters
    alone = TextScorer(*llama, DATA, batch_size=1)(*rows(PROMPTS[::-1]))
    for field, values in scores.items():
        assert (values.shape, values.dtype) == ((5,), torch.float32)
        torch.testing.assert_close(alone[field].flip(0), values, rtol=1e-4, atol=1e-4)


def test_an_answer_is_right_where_greedy_decoding_gives_it():
    model, tokenizer = tiny_llama()
    # it learns one question by heart
    asked = tokens_of(tokenizer, "Question: One plus two?\nAnswer:")
    ids = torch.cat([asked, tokens_of(tokenizer, " three\n")], 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    assert torch.equal(model.generate(asked, max_new_tokens=7, do_sample=False), ids)
    # one of three people gave that answer; of the other question it knows nothing
    question = QUERIES[0].question
    people = item("q", question, "no", "no", "three"), item("r", question, "three"), QUERIES[1]
    scorer = TextScorer(model, tokenizer, VQAData(people, BANK))
    scores = scorer(*rows([(0, []), (1, []), (2, [])]))
    close(scores["vqa_correct"], [1.0, 1.0, 0.0])
    close(scores["vqa_acc_score"], [1 / 3, 1.0, 0.0])
    first, known, other = scores["vqa_rel_score"]
    assert max(first, other) < 0.1
    assert known == 1


def test_a_model_that_chats_ends_its_answer_by_the_template(llama):
    model, tokenizer = tiny_llama()
    tokenizer.chat_template = CHAT
    scores = TextScorer(model, tokenizer, DATA)(*rows([(1, [0])]))
    asked = "\nAnswer with a single word or a short phrase."
    text = f"user: One plus one?{asked}<end>assistant: two<end>user: Four plus one?{asked}<end>"
    wanted = by_hand(model, tokenizer, f"{text}assistant:", " five<end>")
    assert float(scores["logprob_score"][0]) == pytest.approx(wanted, abs=1e-3)
    # the same model without its template
    plain = TextScorer(model, tokenizer, DATA, chats=False)(*rows([(1, [0])]))
    same = TextScorer(*llama, DATA)(*rows([(1, [0])]))
    torch.testing.assert_close(plain, same)


def test_a_selector_learns_from_answers_of_the_model_that_was_recorded(
    llama, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for part in llama:
        part.save_pretrained("model")
    names = ("zero", "one", "two", "three", "four")
    questions = [f"{name} {letter} plus zero?" for name in names for letter in "abcdef"]
    answers = [question.split()[0] for question in questions]
    columns = {"question": questions, "answer": answers, "question_type": answers}
    items = pl.DataFrame(columns | {"part": ["query", "demonstration"] * 15}).with_row_index("id")
    items.write_csv("items.csv")
    # embeddings are made of the questions
    asks = "model=model vlm.data=items.csv vlm.device=cpu pool.size=6 pool.sampler=random"
    options = """beams.width=0 beams.random=3 beams.retrieved=2 beams.same_kind=2 beams.json=false
        out=out"""
    launch("profile", asks, options)
    table = BeamTable.load("out/beams.safetensors")
    assert len(table.query_ids) == len(table.candidates) == 15
    assert table.queries.shape == table.candidates.shape
    # pairs of the query's own kind are recorded as samples
    data = read_vqa_data("items.csv", images=False)
    asked, answered = (
        np.array([item.question_type for item in part]) for part in (data.queries, data.bank)
    )
    query, beam = (table.found_by == METHODS.index("sample")).nonzero(as_tuple=True)
    shown = bank_rows(table.pool[query], table.sequences[query, beam]).numpy()
    assert len(shown)
    assert ((answered[shown] == asked[query.numpy(), None]) | (shown < 0)).all()
    # a recorded score is the scorer's
    shown = table.pool[0][table.sequences[0, :1]]
    score = TextScorer(*llama, data)(torch.tensor([0]), shown)["logprob_score"]
    close(table.fields["logprob_score"][0, :1], score, 1e-3)
    assert not Path("out/beams.json").exists()
    recorded = """beams=files beams.path=out/beams.safetensors beams.model=model
        beams.vlm.data=items.csv beams.vlm.device=cpu"""
    train = words_of(
        "train experiment=selector_language name=run",
        recorded,
        """selector.width=16 seeds=[0] jobs=1 sft.epochs=1 rce.epochs=1 grpo.epochs=1
        judged_shots=[1,2] tracking=disabled beams.train=.6 beams.validation=.2
        variants.grpo_live.epochs=1""",
    )
    launch(train)
    results = read_json("runs/selector_language/run/results.json")
    assert results["judged_by"] == "scorer"
    found = {(row["policy"], row["shots"]) for row in results["rows"]}
    for policy in ("sft", "rce", "grpo_recorded", "grpo_live", "similarity", "mmr", "same_kind"):
        assert {(policy, 1), (policy, 2)} <= found
    # judged later, on the same queries: those of training are left out whatever the split
    best = "runs/selector_language/run/checkpoints/best.pt"
    options = f"checkpoint={best} beams.split_seed=5 judged_shots=[1] json=judged.json"
    launch("evaluate", recorded, options)
    fitted = load_checkpoint(best).extra["fitted"]
    assert read_json("judged.json")["test_queries"] == 15 - len(fitted)
    # another model than the one that was recorded is refused
    tiny_llama(seed=1)[0].save_pretrained("model")
    for wrong, fault in {
        "name=other": "beams.model",
        "beams.model=null": "beams.vlm",
        "beams.vlm.embeddings=e.npz": "beams.vlm.embeddings",
        "imitated=some": "imitated",
    }.items():
        assert fault in mistake([*train, "name=other", wrong], capsys)
    # items of other queries are refused
    items[[*range(30), 0]].with_columns(id=pl.int_range(31)).write_csv("items.csv")
    assert "beams.vlm.data" in mistake([*train, "name=other"], capsys)


SCORERS = """
import torch


class Even:
    sees = False

    def __init__(self, data):
        self.data = data

    def __call__(self, queries, demonstrations):
        # right where an even number of demonstrations is shown
        right = ((demonstrations >= 0).sum(1) % 2 == 0).float()
        fields = {"vqa_correct": right, "vqa_acc_score": right, "vqa_rel_score": right}
        return fields | {"logprob_score": right - 1, "vqa_gt_prob": (right - 1).exp()}

    def vote(self, queries, demonstrations):
        return torch.zeros(len(queries))


class Silent:
    def __init__(self, data):
        pass
"""


def test_a_scorer_of_your_own_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scorers_of_a_test.py").write_text(SCORERS)
    lines = ["id,question,answer", *(f"{n},What is {n}?,{n}" for n in range(6))]
    (tmp_path / "items.csv").write_text("\n".join(lines))
    words = words_of("""profile vlm.data=items.csv pool.size=4 beams.width=0 beams.retrieved=1
        beams.random=2 beams.json=false out=out""")
    for shots, correct in ((2, 1), (1, 0)):
        launch(words, f"model=scorers_of_a_test:Even beams.shots={shots} out=out{shots}")
        table = BeamTable.load(f"out{shots}/beams.safetensors")
        assert (table.fields["vqa_correct"][table.beam_mask] == correct).all()
    # its items may have images, unless it says that it sees none
    for name, fault in (("Silent", "image"), ("Gone", "Gone")):
        assert fault in refused([*words, f"model=scorers_of_a_test:{name}"], capsys)
