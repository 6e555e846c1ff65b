"""`knobwise profile model=FOLDER data=FILE` with a tiny random model of every family; the importance of blocks."""

import copy
import json

import polars as pl
import pytest
import torch
from safetensors.numpy import load_file
from test_hf_knobs import asked
from tiny_models import BLOCKS, FAMILIES, TOP_K, picture, saved, tiny_model

from knobwise.__main__ import main
from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.knobs import HuggingFaceKnobs
from knobwise.profiling.huggingface.profile import AnswerLikelihood, measure_importance, read_importance, weights_digest
from knobwise.profiling.measuring import measuring as vlm_measuring

DENSE = ("smolvlm", "idefics3", "molmo2")


@pytest.fixture
def questions(tmp_path):
    """Four questions about two images, with the answers of three people."""
    for name, size in (("wide", (160, 256)), ("square", (144, 144))):
        picture(0, *size).save(tmp_path / f"{name}.png")
    rows = [
        {"id": f"q{n}", "image": f"{('wide', 'square')[n % 2]}.png", "question": "What?", "answers": ["a", "a", "b"]}
        for n in range(4)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_is_profiled_and_read_back(family, questions, tmp_path, capsys):
    folder, out = saved(tmp_path / family, *tiny_model(family)), tmp_path / "out"
    knobs = ["knobs.max_crops=[1,4]", f"knobs.num_active_blocks=[3,{BLOCKS}]"]
    if family not in DENSE:
        knobs.append(f"knobs.top_k=[1,{TOP_K}]")
    words = [*knobs, "knobs.repeats=1", "knobs.samples=2", "knobs.max_new_tokens=3", "device=cpu"]
    assert main(["profile", f"model={folder}", f"data={questions}", f"out={out}", *words]) == 0

    configurations = 4 if family in DENSE else 8
    table = pl.read_parquet(out / "table.parquet")
    assert len(table) == 2 * configurations
    assert (table["latency_ms"] > table["prefill_ms"]).all()
    features = load_file(out / "features.safetensors")
    assert len(features["image_features"]) == len(features["language_features"]) == 2
    knobs = {knob["name"]: knob for knob in json.loads((out / "profile.json").read_text())["knobs"]}
    assert bool(knobs["top_k"]["note"]) == (family in (*DENSE, "llama4"))
    printed = capsys.readouterr().out
    assert "lacks" in printed or family not in DENSE
    assert f"2 samples × {configurations} configurations" in printed

    read = ["profile=exp5_exp6", f"profile.exp5_dir={out}/exp5", f"profile.exp6_dir={out}/exp6"]
    read += ["profile.dataset_name=questions", f"profile.features={out}/features.safetensors"]
    facts = tmp_path / "facts.json"
    assert main(["inspect", *read, f"json={facts}"]) == 0
    assert json.loads(facts.read_text())["samples"] == 2
    assert json.loads(facts.read_text())["configurations"] == configurations


def test_importance_is_measured_once_and_then_used(questions, tmp_path, monkeypatch):
    folder, out = saved(tmp_path / "model", *tiny_model("llava_next")), tmp_path / "out"
    words = ["profile", f"model={folder}", f"data={questions}", f"out={out}", "importance=measure", "device=cpu"]
    words += ["knobs.num_active_blocks=[2,4]", "knobs.repeats=1", "knobs.samples=2", "knobs.max_new_tokens=3"]
    assert main(words) == 0
    importance = json.loads((out / "importance.json").read_text())
    assert importance.keys() == {"1", "2", "3"}
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text(json.dumps({"1": 0.0, "2": 0.0, "3": 9.0}))
    kept = []
    measure = vlm_measuring.measure
    monkeypatch.setattr(
        "knobwise.profiling.measuring.profiler.measure",
        lambda vlm, *rest, **more: kept.append(vlm.knobs_of_model.active_blocks(2)) or measure(vlm, *rest, **more),
    )
    assert main(words) == 0  # nothing is left to measure, importance among it
    most = max(importance, key=lambda block: importance[block])
    others = [word for word in words if not word.startswith(("out", "importance"))]
    assert main([*others, f"out={tmp_path}/b", f"importance={by_hand}"]) == 0
    assert kept == [(0, int(most)), (0, 3)]


def test_mistakes_are_named_and_nothing_is_written(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    for words, message in {
        "model=./nowhere": "./nowhere: no such folder",
        "dtype=float8": "dtype='float8': must be one of",
        "importance=nothing.json": "nothing.json: cannot be read",
        "knobs.num_active_blocks=[0]": "num_active_blocks=0: this model takes 1 to 4",
        "importance=measure knobs.num_active_blocks=[5]": "num_active_blocks=5",
        "knobs.metric=choice": "q0",
    }.items():
        command = ["profile", f"model={folder}", "data=questions.jsonl", "out=out", "device=cpu", *words.split()]
        assert main(command) == 2, words
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_other_weights_have_another_digest(tmp_path):
    folder = saved(tmp_path / "model", *tiny_model("llava_next"))
    before = weights_digest(folder)
    assert weights_digest(folder) == before
    path = next(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert weights_digest(folder) != before
    assert weights_digest("org/name", "abc") == "commit:abc"
    # of a large file pieces of all of it
    large = tmp_path / "model" / "large.safetensors"
    seen = []
    for place in (None, 5 << 20, (16 << 20) - (1 << 18)):
        with large.open("wb") as file:
            file.truncate(16 << 20)
            if place is not None:
                file.seek(place)
                file.write(b"1")
        seen.append(weights_digest(folder))
    assert len(set(seen)) == 3


# -- the importance of blocks ------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    return tmp_path / "importance.json"


def test_the_format_is_a_number_for_each_block(file):
    file.write_text('{"10": 0.25, "4": 0.0156, "5": -1}')
    assert list(read_importance(file).items()) == [(4, 0.0156), (5, -1.0), (10, 0.25)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"), ("{4: 0.1}", "not JSON"), (b"\xff\xfe\x00", "not JSON"),
        ("[0.1, 0.2]", "must hold a number for each block"), ("{}", "must hold a number for each block"),
        ('{"layer.4": 0.1}', "'layer.4' is not the number of a block"),
        ('{"-1": 0.1}', "'-1' is not the number of a block"),
        ('{"²": 0.1}', "'²' is not the number of a block"), ('{"4": 0.1, "4": 0.2}', "the key '4' occurs twice"),
        ('{"4": NaN}', "holds NaN, which is not JSON"),
        ('{"4": 1e999}', "importance of block 4 is inf"), ('{"4": "0.1"}', "importance of block 4 is '0.1'"),
        ('{"4": true}', "importance of block 4 is True"), ('{"4": {"4": 0.1}}', "importance of block 4 is"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused(file, text, message):
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError, match=message) as raised:
        read_importance(file)
    assert str(file) in str(raised.value)


@pytest.fixture(scope="module", params=["llava_next", "qwen3_5_moe"])
def made(request):
    model, processor = tiny_model(request.param)
    prompts = [asked(processor, (20, 30)), asked(processor, (40, 20))]
    return model, processor, prompts


def test_the_likelihood_is_that_of_the_models_own_logits(made):
    model, processor, prompts = made
    words = [processor.tokenizer(text, return_tensors="pt")["input_ids"][0] for text in ("2", "no cats")]
    likelihood = AnswerLikelihood(model, prompts)
    likelihood.answers = words
    found = likelihood()
    means = []
    for prompt, answer in zip(prompts, words, strict=True):
        total = 0.0
        for place, token in enumerate(answer):  # one token at a time
            so_far = dict(prompt)
            so_far["input_ids"] = torch.cat([prompt["input_ids"], answer[None, :place]], 1)
            for name in ("attention_mask", "mm_token_type_ids"):
                if name in prompt:
                    new = torch.full((1, place), int(name == "attention_mask"))
                    so_far[name] = torch.cat([prompt[name], new], 1)
            with torch.no_grad():
                total += float(model(**so_far).logits[0, -1].log_softmax(-1)[token])
        means.append(total / len(answer))
    assert found == pytest.approx(sum(means) / 2, abs=1e-4)


def test_greedy_answers_are_the_models_own_whatever_its_settings_and_end_where_they_should(made):
    model, _, prompts = made
    settings, wanted = model.generation_config, AnswerLikelihood(model, prompts, max_new_tokens=4).answers
    for prompt, answer in zip(prompts, wanted, strict=True):
        whole = model.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(whole[0, -len(answer) :], answer)
        assert whole.shape[1] == prompt["input_ids"].shape[1] + len(answer)
    model.generation_config = copy.deepcopy(settings)
    try:
        model.generation_config.update(num_beams=3, num_return_sequences=2, return_dict_in_generate=True)
        answers = AnswerLikelihood(model, prompts, max_new_tokens=4).answers
        end = int(wanted[0][1])
        ended = AnswerLikelihood(model, prompts[:1], max_new_tokens=4, end_tokens=[end]).answers[0]
    finally:
        model.generation_config = settings
    assert all(map(torch.equal, answers, wanted))
    assert torch.equal(ended, wanted[0][: wanted[0].tolist().index(end) + 1])


def test_importance_is_what_the_score_loses_without_a_block(made, file):
    model, processor, prompts = made
    knobs = HuggingFaceKnobs(model, processor)
    score = AnswerLikelihood(model, prompts, max_new_tokens=4)
    importance = measure_importance(knobs, score, file)
    assert read_importance(file) == importance
    free = [block for block in range(1, 4) if block not in knobs.always_active]
    assert list(importance) == free
    whole = score()
    for block in free:
        with knobs.leaving_out([block]):
            assert importance[block] == pytest.approx(whole - score(), abs=1e-6)
    assert len(set(importance.values())) == len(free)  # blocks do differ
    chosen = HuggingFaceKnobs(model, processor, importance)
    assert min(importance, key=importance.__getitem__) not in chosen.active_blocks(3)


def test_any_score_can_be_given(made):
    model, processor, _ = made
    knobs = HuggingFaceKnobs(model, processor)
    worth = {(): 10.0, (3,): 9.5, (2,): 4.0, (1,): 11.0}
    blocks = model.model.language_model.layers

    def score():
        return worth[tuple(number for number, block in enumerate(blocks) if "forward" in vars(block))]

    expected = {1: -1.0, 2: 6.0, 3: 0.5}
    assert measure_importance(knobs, score) == {
        block: drop for block, drop in expected.items() if block not in knobs.always_active
    }


def test_a_score_that_is_not_finite_is_refused_and_nothing_is_written(made, file):
    model, processor, _ = made
    scores = iter([1.0, float("nan")])
    with pytest.raises(InputError, match=r"score without block \d is nan"):
        measure_importance(HuggingFaceKnobs(model, processor), lambda: next(scores), file)
    assert not file.exists()
