"""A language model whose knobs are its demonstrations, on a tiny random Llama made here."""

from dataclasses import replace

import polars as pl
import pytest
import torch
from helpers import input_error
from tiny_models import tiny_llama

from knobwise.agents import Selector, SelectorConfig
from knobwise.envs import BeamTable
from knobwise.profiling.measuring.adaptive_model import Request
from knobwise.profiling.measuring.profiler import profile_vlm
from knobwise.profiling.measuring.questions import VQAItem
from knobwise.profiling.measuring.settings import VLMProfileConfig
from knobwise.testbeds.smollm import demonstrated_model
from knobwise.testbeds.smollm.demonstrated_model import POOL, DemonstratedModel

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BANK = tuple(
    VQAItem(f"{a} {b}", None, f"What is {a} plus {b}?", (WORDS[(i + j) % 10],))
    for i, a in enumerate(WORDS)
    for j, b in enumerate(WORDS[:8])
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    selector = Selector(SelectorConfig(version="v1", width=8), 80)
    return DemonstratedModel(*tiny_llama(), BANK, selector, max_new_tokens=4)


def questions_of(demonstrations):
    return [item.question for item in demonstrations]


def test_demonstrations_come_from_the_pool_and_never_hold_the_question(model):
    question = BANK[3].question
    pool = {*questions_of(model.demonstrations(question, POOL, "random"))}
    assert len(pool - {question}) == POOL
    # all orders have the same pool, and are the same each time
    for order in model.measured["order"]:
        shown = model.demonstrations(question, POOL, order)
        assert {*questions_of(shown)} == pool
        assert model.demonstrations(question, POOL, order) == shown


def test_the_pool_of_a_small_bank_is_the_bank(model):
    # a question counts once, however it is spelled
    question = f" {BANK[9].question.upper()} "
    few = (*BANK[:10], replace(BANK[9], question=question))
    small = DemonstratedModel(model.model, model.tokenizer, few, model.selector)
    assert small.knobs[0].most == 9
    for spelled in (question, BANK[9].question):
        shown = small.demonstrations(spelled, 9, "nearest")
        assert sorted(questions_of(shown)) == sorted(questions_of(BANK[:9]))
    with input_error("bank"):
        DemonstratedModel(model.model, model.tokenizer, BANK[:8], model.selector)


def test_the_nearest_comes_last(model):
    question = "What is one plus ten?"
    embedded = model._embed([question])
    pool = model.demonstrations(question, POOL, "random")
    cosines = torch.cosine_similarity(embedded, model._embed(questions_of(pool)))
    nearest = [pool[row] for row in cosines.topk(3).indices.tolist()]
    assert model.demonstrations(question, 3, "nearest") == nearest[::-1]
    assert model.demonstrations(question, 1, "mmr") == nearest[:1]
    features = model.first_stage(Request(None, question)).features
    assert features["pool_features"] == pytest.approx(cosines.topk(8).values.numpy(), abs=1e-6)
    assert features["language_features"] == pytest.approx(embedded[0].numpy())


def test_the_model_answers_after_its_demonstrations(model):
    question = "What is two plus two?"
    stage = model.first_stage(Request(None, question))
    (answer,) = model.answer([stage], {"shots": 2, "order": "nearest"})
    first, second = model.demonstrations(question, 2, "nearest")
    text = "".join(f"Question: {x.question}\nAnswer: {x.answer}\n" for x in (first, second))
    prompt = model.tokenizer(f"{text}Question: {question}\nAnswer:", return_tensors="pt")
    ids = prompt["input_ids"]
    output = model.model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)
    written = model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.text == written.partition("\n")[0].strip()
    assert answer.language_tokens == ids.shape[1]
    with input_error("order"):
        model.answer([stage], {"order": "best"})


def test_a_profile_has_both_knobs(model, tmp_path, monkeypatch):
    config = VLMProfileConfig(values={"shots": [1, 2]}, repeats=1, clock="cpu")
    table = pl.read_parquet(profile_vlm(tmp_path, model, BANK[:2], config) / "table.parquet")
    assert table.n_unique(["sample_id", "shots", "order"]) == 2 * 2 * 4
    # other demonstrations make another model
    monkeypatch.setattr(model, "bank", BANK[1:])
    with input_error("demonstrations"):
        profile_vlm(tmp_path, model, BANK[:2], config)


def test_the_selector_that_comes_with_knobwise_is_asked_about_what_it_did_not_learn(monkeypatch):
    monkeypatch.setattr(demonstrated_model, "smollm_folder", lambda: "")
    monkeypatch.setattr(demonstrated_model, "load_pretrained", lambda *_: tiny_llama())
    model = demonstrated_model.SmollmShots()
    beams = BeamTable.load(demonstrated_model.BEAMS)
    learned = {beams.query_ids[row] for row in beams.split(*demonstrated_model.SHARES).train}
    names = {item.id for item in model.questions}
    assert len(names) == len(model.questions) >= 1000
    assert not learned & names
    # it was trained to choose by kind; what it chooses here is mostly of the question's own
    same = 0
    for item in model.questions[:40]:
        shown = model.demonstrations(item.question, 2, "learned")
        same += sum(item.question_type == shot.question_type for shot in shown)
    assert same > 40
