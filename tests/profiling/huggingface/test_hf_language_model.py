"""A language model without images behind the interface of adaptive models."""

import numpy as np
import pytest
import torch
from tiny_models import BLOCKS, EXPERTS, TOP_K, tiny_language_model

from knobwise.common.errors import InputError
from knobwise.profiling.huggingface.model import HuggingFaceModel
from knobwise.profiling.measuring.adaptive_model import Request

REQUESTS = [Request(None, "What is this?"), Request(None, "Why?")]


@pytest.fixture(scope="module")
def model():
    return HuggingFaceModel(*tiny_language_model(), max_new_tokens=5)


def texts(model, requests, **configuration):
    stages = [model.first_stage(request, features=False) for request in requests]
    return [answer.text for answer in model.answer(stages, configuration)]


def test_knobs_are_experts_and_blocks(model):
    crops, top_k, blocks = model.knobs
    assert not crops.available
    assert "image" in crops.note
    assert (top_k.least, top_k.default, top_k.most) == (1, TOP_K, EXPERTS)
    assert (blocks.least, blocks.most) == (1, BLOCKS)
    with pytest.raises(InputError, match="max_crops"):
        texts(model, REQUESTS, max_crops=2)


def test_features_are_the_mean_embedding_of_the_prompt(model):
    stage = model.first_stage(REQUESTS[0])
    ids = model.tokenizer("Question: What is this?\nAnswer:", add_special_tokens=False)["input_ids"]
    wanted = model.model.get_input_embeddings()(torch.tensor(ids)).mean(0).detach().numpy()
    assert set(stage.features) == {"language_features"}
    np.testing.assert_allclose(stage.features["language_features"], wanted, rtol=1e-5, atol=1e-6)
    # nothing of it serves the answer
    assert stage.extra_ms == stage.total_ms > 0


def test_answers_are_those_of_plain_generation(model):
    prompt = "Question: Why?\nAnswer:"
    inputs = model.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    tokens = model.model.generate(**inputs, max_new_tokens=5, do_sample=False)
    new = tokens[0, inputs["input_ids"].shape[1] :]
    said = model.tokenizer.decode(new, skip_special_tokens=True).strip().partition("\n")[0].rstrip()
    assert texts(model, REQUESTS[1:]) == [said]
    (answer,) = model.answer([model.first_stage(REQUESTS[1])], {})
    assert (answer.vision_tokens, answer.language_tokens) == (0, inputs["input_ids"].shape[1])
    assert 0 <= answer.vision_ms <= answer.prefill_ms <= answer.total_ms


def test_a_batch_answers_as_one_request_after_the_other(model):
    for configuration in ({}, {"top_k": 1, "num_active_blocks": 2}):
        alone = [texts(model, [request], **configuration)[0] for request in REQUESTS]
        assert texts(model, REQUESTS, **configuration) == alone


def test_a_block_that_is_left_out_does_not_count(model):
    left_out, _ = tiny_language_model()
    active = model.knobs_of_model.active_blocks(3)
    gone = next(i for i in range(BLOCKS) if i not in active)
    del left_out.model.layers[gone]
    left_out.config.num_hidden_layers = BLOCKS - 1
    for i, block in enumerate(left_out.model.layers):
        block.self_attn.layer_idx = i
    smaller = HuggingFaceModel(left_out, model.processor, max_new_tokens=5)
    assert texts(model, REQUESTS, num_active_blocks=3) == texts(smaller, REQUESTS)


def test_a_question_must_be_a_text(model):
    with pytest.raises(InputError, match="text"):
        model.first_stage(Request(None, 3))
