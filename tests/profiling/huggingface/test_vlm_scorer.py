"""The scorer of Hugging Face models, on tiny random ones of three families made here without any
download."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers import input_error
from tiny_models import FAMILIES, SCORERS, chat, picture, rows, tiny_model

from knobwise.profiling.huggingface.scorer import VLMScorer
from knobwise.profiling.measuring.questions import VQAData, VQAItem


def item(seed, question, *answers, **more):
    image = picture(seed, 8 + 4 * (seed % 3), 12)
    return VQAItem(str(seed), image, question, answers, **more)


QUERIES = (
    item(0, "How many dogs ?", "2", choices=("2", "3", "red", "red blue green")),
    item(1, "What color is it ?", *["red"] * 5, *["blue"] * 3, *["green"] * 2),
    item(2, "How many ?", "1", choices=("1", "2", "3")),
)
BANK = (
    item(3, "How many cats ?", "3"),
    item(4, "What color is it ?", "red blue"),
    item(5, "How many dogs ?", "1"),
    item(6, "What color is it ?", "green"),
)
DATA = VQAData(QUERIES, BANK)
LONELY = VQAData((replace(QUERIES[0], choices=("2",)),), BANK)
MIXED = [(0, [0, 1]), (1, [3, 2, 0]), (2, []), (0, [1, 0]), (1, [1])]


@pytest.fixture(scope="module", params=(*SCORERS, *FAMILIES))
def family(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llava():
    return tiny_model("llava")


def by_hand(model, processor, text, images, answer):
    """ln P of the words of an answer after a text, from the model's logits over the whole, word by
    word."""
    inputs = processor(text=[text + answer], images=[images], return_tensors="pt")
    words = processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    ids, total = inputs["input_ids"][0].tolist(), 0.0
    assert ids[-len(words) :] == words
    for place in range(len(ids) - len(words), len(ids)):
        odds = [math.exp(x) for x in logits[place - 1].tolist()]
        total += math.log(odds[ids[place]] / sum(odds))
    return total


def test_likelihoods_are_the_sums_over_the_models_own_logits(llava):
    scorer = VLMScorer(*llava, DATA)
    text = "user :<image> How many {} ?\nAnswer with a single word or a short phrase. <end>\nassistant :"
    text = f"{text.format('cats')} 3 <end>\n{text.format('dogs')}"
    (likelihoods,) = scorer.log_likelihoods([(0, [0])])
    images = [BANK[0].picture(), QUERIES[0].picture()]
    assert scorer.answers(0) == ("2", "3", "red", "red blue green")
    wanted = [by_hand(*llava, text, images, f" {answer} <end>") for answer in scorer.answers(0)]
    np.testing.assert_allclose(likelihoods, wanted, atol=1e-4)


def test_without_a_chat_template_the_prompt_is_plain(llava):
    model, processor = tiny_model("llava")
    processor.chat_template = None
    text = (
        "<image> Question: What color is it ? Answer: green\n<image> Question: How many ? Answer:"
    )
    (likelihoods,) = VLMScorer(model, processor, DATA).log_likelihoods([(2, [3])])
    images = [BANK[3].picture(), QUERIES[2].picture()]
    wanted = [by_hand(model, processor, text, images, f" {answer}\n") for answer in "123"]
    np.testing.assert_allclose(likelihoods, wanted, atol=1e-4)


def test_neither_the_cache_nor_batch_nor_padding_changes_likelihoods(family):
    scorer = VLMScorer(*family, DATA)
    with torch.inference_mode():
        whole = [scorer._whole(prompt, scorer._candidates(prompt[0]).tokens) for prompt in MIXED]
    together = scorer.log_likelihoods(MIXED)
    alone = [scorer.log_likelihoods([prompt])[0] for prompt in MIXED]
    assert all(values.std() > 0.01 for values in whole)
    torch.testing.assert_close(together, whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(alone, whole, rtol=0, atol=1e-4)


def test_scores_do_not_depend_on_batch_size_nor_on_the_order_of_the_rows(llava):
    llava[0].train()
    scores = VLMScorer(*llava, DATA, batch_size=1)(*rows(MIXED))
    assert not llava[0].training
    pairs = VLMScorer(*llava, DATA, batch_size=2)(*rows(MIXED[::-1]))
    for field, values in scores.items():
        assert (values.shape, values.dtype, values.requires_grad) == ((5,), torch.float32, False)
        torch.testing.assert_close(pairs[field].flip(0), values, rtol=1e-4, atol=1e-4)


def test_the_probabilities_of_everything_that_can_be_said_sum_to_one(llava):
    scorer, words = VLMScorer(*llava, DATA), range(len(llava[1].tokenizer))
    inputs = scorer._inputs([(0, [0, 1]), (2, [])])
    one, two = [[word] for word in words], [[first, second] for first in words for second in words]
    with torch.inference_mode():
        firsts, pairs = (scorer._after_cache(inputs, [said, said]) for said in (one, two))
    for first, pair in zip(firsts, pairs, strict=True):
        assert float(pair.exp().sum()) == pytest.approx(1, abs=1e-4)
        # a word is as likely as all that begins with it
        torch.testing.assert_close(pair.view(len(words), -1).logsumexp(1), first, rtol=0, atol=1e-4)


def test_the_order_the_number_and_the_presence_of_demonstrations_matter(llava):
    prompts = [(0, [0, 1]), (0, [1, 0]), (0, [0]), (0, [])]
    scores = VLMScorer(*llava, DATA)(*rows(prompts))
    assert len(scores["logprob_score"].unique()) == 4
    # zero-shot, whatever the width
    narrow = VLMScorer(*llava, DATA)(torch.tensor([0]), torch.tensor([[-1]]))
    assert narrow["logprob_score"][0] == pytest.approx(float(scores["logprob_score"][3]), abs=1e-4)


def test_fields_follow_from_the_ranking(llava):
    words = ("1", "2", "3", "red")

    def with_answers(*answers):
        return VQAData((item(0, "How many dogs ?", *answers, choices=words),), BANK)

    (found,) = VLMScorer(*llava, with_answers("1")).log_likelihoods([(0, [0, 1])])
    order = found.argsort(descending=True).tolist()
    ranked, values = [words[place] for place in order], found[order].tolist()
    cases = {  # references → the answer that counts as right, soft accuracy of the first, correct
        (ranked[0],): (0, 1.0, 1.0),
        (ranked[2],): (2, 0.0, 0.0),
        (*[ranked[0]] * 3, *[ranked[1]] * 7): (1, 1.0, 1.0),
        (*[ranked[0]] * 2, *[ranked[1]] * 8): (1, 2 / 3, 0.0),
        (ranked[3], ranked[0]): (0 if order[0] < order[3] else 3, 0.5, 1.0),
    }
    for answers, (right, accuracy, correct) in cases.items():
        scores = VLMScorer(*llava, with_answers(*answers))(*rows([(0, [0, 1])]))
        wanted = {
            "logprob_score": values[right],
            "vqa_gt_prob": math.exp(values[right]),
            "vqa_acc_score": accuracy,
            "vqa_correct": correct,
            "vqa_rel_score": math.exp(values[right] - values[0]),
        }
        assert {k: v.item() for k, v in scores.items()} == pytest.approx(wanted, abs=1e-5)


def test_a_vote_counts_the_demonstrations_own_answers(llava):
    answers = ("2", "Two.", "3", "3", "red")
    bank = tuple(item(10 + place, "How many ?", answer) for place, answer in enumerate(answers))
    queries = item(0, "How many ?", "2"), item(1, "How many ?", *"33322224")
    scorer = VLMScorer(*llava, VQAData(queries, bank))
    shown = [
        ([0, 2, -1], 1, 1),  # a tie: the first counts, which is right for the first query
        # 3 is right for the second one too: three of its references are as good as four
        ([2, 0, -1], 0, 1),
        ([2, 0, 1], 1, 1),  # 2 and "Two." are one answer
        ([4, 2, 3], 0, 1),
        ([4, -1, -1], 0, 0),
        ([-1, -1, -1], 0, 0),
    ]
    demonstrations, *right = map(torch.tensor, zip(*shown, strict=True))
    for query in (0, 1):
        found = scorer.vote(torch.full((len(shown),), query), demonstrations)
        assert torch.equal(found, right[query].float())


@pytest.mark.parametrize("how", ["another likelihood", "no cache"])
def test_without_a_cache_that_serves_every_answer_is_computed_whole(llava, how):
    class Stubborn(transformers.LlavaForConditionalGeneration):
        def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
            positions = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
            return positions * 2 if how == "another likelihood" else positions

        def forward(self, **inputs):
            outputs = super().forward(**inputs)
            if how == "no cache":
                outputs.past_key_values = None
            return outputs

    model = Stubborn(llava[0].config)
    model.load_state_dict(llava[0].state_dict())
    scorer = VLMScorer(model, llava[1], DATA)
    with pytest.warns(UserWarning, match="Stubborn"):
        scores = scorer(*rows(MIXED))
    assert scorer.reuse_prompt is False
    wanted = VLMScorer(*llava, DATA)(*rows(MIXED))
    for name, values in wanted.items():
        torch.testing.assert_close(scores[name], values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (chat("<image>"), ["red", "blue", "<end>"]),
        # nothing ends an answer: the end of text does
        (chat("<image>").replace("<end>", ""), ["red", "blue", "</s>"]),
        # a prompt that opens more
        (chat("<image>").replace("assistant:{", "assistant: it{"), ["red", "blue", "</s>"]),
    ],
)  # fmt: skip
def test_the_tokens_of_an_answer_go_up_to_its_end(template, tokens):
    model, processor = tiny_model("llava")
    processor.chat_template = template
    found = VLMScorer(model, processor, DATA)._answer_tokens(QUERIES[0], "red blue")
    assert processor.tokenizer.convert_ids_to_tokens(found) == tokens


def test_a_tokenizer_without_padding_pads_with_its_end(llava):
    model, processor = tiny_model("llava")
    processor.tokenizer.pad_token = None
    wanted = VLMScorer(*llava, DATA)(*rows(MIXED))
    found = VLMScorer(model, processor, DATA)(*rows(MIXED))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("data", "size", "fault"), [(DATA, 0, "batch_size"), (LONELY, 1, "'0'")])
def test_sizes_and_choices_that_make_no_sense_are_refused(llava, data, size, fault):
    with input_error(fault):
        VLMScorer(*llava, data, batch_size=size)(*rows([(0, [0])]))
