"""The scorer of language models, on a tiny random Llama made here without any download."""

import json
from pathlib import Path

import pytest
import torch
from commands import main, mistake, refused
from tiny_models import rows, tiny_llama

from knobwise.agents.checkpoint import load_checkpoint
from knobwise.common.errors import InputError
from knobwise.envs.demonstrations.beam_table import BeamTable
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


def by_hand(model, tokenizer, text, answer):
    """ln P of each character of an answer after a text, one pass for each."""
    total = 0.0
    for end in range(len(answer)):
        ids = tokenizer(text + answer[:end], add_special_tokens=False, return_tensors="pt")
        (wanted,) = tokenizer(answer[end], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(ids["input_ids"]).logits[0, -1]
        total += float(logits.log_softmax(-1)[wanted])
    return total


def test_likelihoods_are_those_of_the_whole_text(llama):
    scores = TextScorer(*llama, DATA)(*rows(PROMPTS))
    two, four = "Question: One plus one?\nAnswer: two\n", "Question: Two plus two?\nAnswer: four\n"
    texts = [two + four, four + two, "", four, two + four]
    for text, (query, _), found in zip(texts, PROMPTS, scores["logprob_score"], strict=True):
        asked = f"{text}Question: {QUERIES[query].question}\nAnswer:"
        wanted = by_hand(*llama, asked, f" {QUERIES[query].answer}\n")
        assert float(found) == pytest.approx(wanted, abs=1e-3)
    torch.testing.assert_close(scores["vqa_gt_prob"], scores["logprob_score"].exp())
    # the order and the number of demonstrations matter
    assert len(scores["logprob_score"].unique()) == 5


def test_neither_batch_nor_padding_nor_order_changes_scores(llama):
    together = TextScorer(*llama, DATA)(*rows(PROMPTS))
    alone = TextScorer(*llama, DATA, batch_size=1)(*rows(PROMPTS[::-1]))
    for field, values in together.items():
        assert (values.shape, values.dtype) == ((5,), torch.float32)
        torch.testing.assert_close(alone[field].flip(0), values, rtol=1e-4, atol=1e-4)


def test_an_answer_is_right_where_greedy_decoding_gives_it():
    model, tokenizer = tiny_llama()
    # it learns one question by heart
    text = "Question: One plus two?\nAnswer: three\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
    asked = len(
        tokenizer("Question: One plus two?\nAnswer:", add_special_tokens=False)["input_ids"]
    )
    said = model.generate(ids[:, :asked], max_new_tokens=7, do_sample=False)[0, asked:]
    assert tokenizer.decode(said) == " three\n"
    # one of three people gave that answer; of the other question it knows nothing
    question = QUERIES[0].question
    people = item("q", question, "no", "no", "three"), item("r", question, "three"), QUERIES[1]
    scorer = TextScorer(model, tokenizer, VQAData(people, BANK))
    scores = scorer(torch.arange(3), torch.full((3, 1), -1))
    assert scores["vqa_correct"].tolist() == [1.0, 1.0, 0.0]
    torch.testing.assert_close(scores["vqa_acc_score"], torch.tensor([1 / 3, 1.0, 0.0]))
    assert float(scores["vqa_rel_score"][1]) == 1.0
    assert (scores["vqa_rel_score"][[0, 2]] < 0.1).all()


def test_a_model_that_chats_ends_its_answer_by_the_template(llama):
    model, tokenizer = tiny_llama()
    tokenizer.chat_template = CHAT
    scores = TextScorer(model, tokenizer, DATA)(*rows([(1, [0])]))
    asked = "\nAnswer with a single word or a short phrase."
    text = f"user: One plus one?{asked}<end>assistant: two<end>user: Four plus one?{asked}<end>"
    answer = " five"
    wanted = by_hand(model, tokenizer, f"{text}assistant:", answer)
    ids = tokenizer(f"{text}assistant:{answer}", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        last = model(ids["input_ids"]).logits[0, -1].log_softmax(-1)
    wanted += float(last[tokenizer.convert_tokens_to_ids("<end>")])
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
    names = [f"{a} {b}" for a in ("zero", "one", "two", "three", "four") for b in "abcdef"]
    lines = ["id,question,answer,question_type,part"]
    for number, name in enumerate(names):
        part = ("query", "demonstration")[number % 2]
        lines.append(f"{number},{name} plus zero?,{number},{name.split()[0]},{part}")
    (tmp_path / "items.csv").write_text("\n".join(lines))
    # embeddings are made of the questions
    words = "model=model vlm.data=items.csv vlm.device=cpu pool.size=6 pool.sampler=random"
    options = """beams.width=0 beams.random=3 beams.retrieved=2 beams.same_kind=2 beams.json=false
        out=out"""
    assert main(["profile", *words.split(), *options.split()]) == 0, capsys.readouterr().err
    table = BeamTable.load("out/beams.safetensors")
    assert len(table.query_ids) == len(table.candidates) == 15
    # pairs of the query's own kind are recorded as samples
    data = read_vqa_data("items.csv", images=False)
    kinds = [[item.question_type for item in part] for part in (data.queries, data.bank)]
    for query, beam in (table.found_by == METHODS.index("sample")).nonzero().tolist():
        places = [place for place in table.sequences[query, beam].tolist() if place >= 0]
        assert {kinds[1][table.pool[query, place]] for place in places} == {kinds[0][query]}
    assert (table.found_by == METHODS.index("sample")).any()
    assert table.queries.shape == table.candidates.shape
    # a recorded score is the scorer's
    shown = table.pool[0][table.sequences[0, :1]]
    score = TextScorer(*llama, data)(torch.tensor([0]), shown)["logprob_score"]
    torch.testing.assert_close(table.fields["logprob_score"][0, :1], score, rtol=0, atol=1e-3)
    assert not Path("out/beams.json").exists()
    train = """train experiment=selector_language beams=files beams.path=out/beams.safetensors
        beams.model=model beams.vlm.data=items.csv beams.vlm.device=cpu selector.width=16 seeds=[0]
        jobs=1 sft.epochs=1 rce.epochs=1 grpo.epochs=1 judged_shots=[1,2] tracking=disabled
        beams.train=.6 beams.validation=.2 variants.grpo_live.epochs=1 name=run"""
    assert main(train.split()) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "runs/selector_language/run/results.json").read_text())
    assert results["judged_by"] == "scorer"
    found = {(row["policy"], row["shots"]) for row in results["rows"]}
    for policy in ("sft", "rce", "grpo_recorded", "grpo_live", "similarity", "mmr", "same_kind"):
        assert {(policy, 1), (policy, 2)} <= found
    # judged later, on the same queries: those of training are left out whatever the split
    best = "checkpoint=runs/selector_language/run/checkpoints/best.pt"
    shares = ("beams.train", "beams.validation")
    asked = [word for word in train.split() if word.startswith("beams.")]
    asked = [word for word in asked if not word.startswith(shares)]
    words = ["evaluate", best, "beams=files", *asked, "beams.split_seed=5", "judged_shots=[1]"]
    assert main([*words, "json=judged.json"]) == 0, capsys.readouterr().err
    fitted = load_checkpoint(best.removeprefix("checkpoint=")).extra["fitted"]
    judged = json.loads((tmp_path / "judged.json").read_text())["test_queries"]
    assert judged == 15 - len(fitted)
    # another model than the one that was recorded is refused
    tiny_llama(seed=1)[0].save_pretrained("model")
    other = [*train.split(), "name=other"]
    assert "beams.model" in mistake(other, capsys)
    for wrong, fault in {
        "beams.model=null": "beams.vlm",
        "beams.vlm.embeddings=e.npz": "beams.vlm.embeddings",
        "imitated=some": "imitated",
    }.items():
        assert fault in mistake([*other, wrong], capsys)
    # items of other queries are refused
    (tmp_path / "items.csv").write_text("\n".join([*lines, "x,more?,1,zero,query"]))
    assert "beams.vlm.data" in mistake(other, capsys)


def test_a_file_may_hold_queries_and_demonstrations(tmp_path):
    path = tmp_path / "items.csv"
    path.write_text(
        "id,question,answer,part,question_type\na,A?,1,query,x\nb,B?,2,demonstration,y\n"
    )
    data = read_vqa_data(path, images=False)
    assert [item.id for item in data.queries] == ["a"]
    assert [(item.id, item.question_type) for item in data.bank] == [("b", "y")]
    for wrong in ("other", ""):
        path.write_text(f"id,question,answer,part\na,A?,1,query\nb,B?,2,{wrong}\n")
        with pytest.raises(InputError, match="part"):
            read_vqa_data(path, images=False)
    path.write_text("id,question,answer,part\na,A?,1,query\n")
    with pytest.raises(InputError, match="demonstration"):
        read_vqa_data(path, images=False)


SCORERS = """
import torch


class Even:
    sees = False

    def __init__(self, data):
        self.data = data

    def __call__(self, queries, demonstrations):
        # right where an even number of demonstrations is shown
        right = ((demonstrations >= 0).sum(1) % 2 == 0).float()
        return {
            "vqa_correct": right,
            "vqa_acc_score": right,
            "logprob_score": right - 1,
            "vqa_gt_prob": (right - 1).exp(),
            "vqa_rel_score": right,
        }

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
    options = "vlm.data=items.csv pool.size=4 beams.width=0 beams.retrieved=1 beams.random=2"
    words = ["profile", *options.split(), "beams.json=false", "out=out"]
    assert main([*words, "model=scorers_of_a_test:Even"]) == 0, capsys.readouterr().err
    table = BeamTable.load("out/beams.safetensors")
    assert (table.fields["vqa_correct"][table.beam_mask] == 1).all()
    assert main([*words, "model=scorers_of_a_test:Even", "beams.shots=1", "out=single"]) == 0
    table = BeamTable.load("single/beams.safetensors")
    assert (table.fields["vqa_correct"][table.beam_mask] == 0).all()
    # its items may have images, unless it says that it sees none
    for name, fault in (("Silent", "image"), ("Gone", "Gone")):
        assert fault in refused([*words, f"model=scorers_of_a_test:{name}", "out=other"], capsys)
