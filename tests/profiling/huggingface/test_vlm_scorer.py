"""The scorer of Hugging Face models, on tiny random ones of three families made here without any
download."""

from dataclasses import replace

import pytest
import torch
import transformers
from helpers import close, input_error
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


@torch.no_grad()
def by_hand(model, processor, text, images, answer):
    """ln P of the words of an answer after a text, from the model's logits over the whole, word by
    word."""
    inputs = processor(text=[text + answer], images=[images], return_tensors="pt")
    words = processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
    log_probs = model(**inputs).logits[0, -1 - len(words) : -1].log_softmax(-1)
    assert inputs["input_ids"][0, -len(words) :].tolist() == words
    return float(log_probs.gather(1, torch.tensor(words)[:, None]).sum())


CHAT = "user :<image> {}\nAnswer with a single word or a short phrase. <end>\nassistant :"
PLAIN = "<image> Question: {} Answer:"


@pytest.mark.parametrize("shown", [[], [0], [0, 1], [1, 0]])
@pytest.mark.parametrize(("ask", "end"), [(CHAT, " <end>"), (PLAIN, "\n")])
def test_likelihoods_are_the_sums_over_the_models_own_logits(llava, ask, end, shown):
    demonstrations, query, text = [BANK[row] for row in shown], QUERIES[0], ""
    for item in demonstrations:
        text += f"{ask.format(item.question)} {item.answer}{end}".strip() + "\n"
    text += ask.format(query.question)
    images = [item.picture() for item in (*demonstrations, query)]
    wanted = [by_hand(*llava, text, images, f" {answer}{end}") for answer in query.choices]
    scorer = VLMScorer(*llava, DATA, chats=ask == CHAT)
    assert scorer.answers(0) == query.choices
    close(scorer.log_likelihoods([(0, shown)])[0], wanted, 1e-4)


def test_neither_the_cache_nor_batch_nor_padding_changes_likelihoods(family):
    scorer = VLMScorer(*family, DATA)
    with torch.inference_mode():
        whole = [scorer._whole(prompt, scorer._candidates(prompt[0]).tokens) for prompt in MIXED]
    assert all(values.std() > 0.01 for values in whole)
    alone = [scorer.log_likelihoods([prompt])[0] for prompt in MIXED]
    for found in (scorer.log_likelihoods(MIXED), alone):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)


def test_scores_do_not_depend_on_batch_size_nor_on_the_order_of_the_rows(llava):
    llava[0].train()
    scores = VLMScorer(*llava, DATA, batch_size=1)(*rows(MIXED))
    assert not llava[0].training
    pairs = VLMScorer(*llava, DATA, batch_size=2)(*rows(MIXED[::-1]))
    for field, values in scores.items():
        assert (values.shape, values.dtype, values.requires_grad) == ((5,), torch.float32, False)
        torch.testing.assert_close(pairs[field].flip(0), values, rtol=1e-4, atol=1e-4)


def test_fields_follow_from_the_ranking(llava):
    words = ("1", "2", "3", "red")

    def with_answers(*answers):
        return VQAData((item(0, "How many dogs ?", *answers, choices=words),), BANK)

    (found,) = VLMScorer(*llava, with_answers("1")).log_likelihoods([(0, [0, 1])])
    values, order = found.sort(descending=True)
    first, second, third, last = (words[place] for place in order)
    for references, right, accuracy, correct in (
        ([first], 0, 1.0, 1.0),
        ([third], 2, 0.0, 0.0),
        ([first] * 3 + [second] * 7, 1, 1.0, 1.0),
        ([first] * 2 + [second] * 8, 1, 2 / 3, 0.0),
        ([last, first], 0 if order[0] < order[3] else 3, 0.5, 1.0),
    ):
        scores = VLMScorer(*llava, with_answers(*references))(*rows([(0, [0, 1])]))
        wanted = {
            "logprob_score": values[right],
            "vqa_gt_prob": values[right].exp(),
            "vqa_acc_score": accuracy,
            "vqa_correct": correct,
            "vqa_rel_score": (values[right] - values[0]).exp(),
        }
        assert scores.keys() == wanted.keys()
        for field, value in wanted.items():
            close(scores[field][0], value, 1e-5)


def test_a_vote_counts_the_demonstrations_own_answers(llava):
    answers = ("2", "Two.", "3", "3", "red")
    bank = tuple(item(10 + place, "How many ?", answer) for place, answer in enumerate(answers))
    queries = item(0, "How many ?", "2"), item(1, "How many ?", *"33322224")
    scorer = VLMScorer(*llava, VQAData(queries, bank))
    for shown, first, second in (
        ([0, 2], 1, 1),  # a tie: the first counts, which is right for the first query
        # 3 is right for the second one too: three of its references are as good as four
        ([2, 0], 0, 1),
        ([2, 0, 1], 1, 1),  # 2 and "Two." are one answer
        ([4, 2, 3], 0, 1),
        ([4], 0, 0),
        ([], 0, 0),
    ):
        assert scorer.vote(*rows([(0, shown), (1, shown)])).tolist() == [first, second]


class Misplaced(transformers.LlavaForConditionalGeneration):
    def _prepare_position_ids_for_generation(self, *arguments):
        return 2 * super()._prepare_position_ids_for_generation(*arguments)


class Uncached(transformers.LlavaForConditionalGeneration):
    def forward(self, **inputs):
        return super().forward(**inputs | {"use_cache": False})


class AllLogits(transformers.LlavaForConditionalGeneration):
    def forward(self, **inputs):
        return super().forward(**inputs)


def like(model, kind):
    other = kind(model.config)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("kind", [Misplaced, Uncached])
def test_without_a_cache_that_serves_every_answer_is_computed_whole(llava, kind):
    scorer = VLMScorer(like(llava[0], kind), llava[1], DATA)
    with pytest.warns(UserWarning, match=kind.__name__):
        scores = scorer(*rows(MIXED))
    assert scorer.reuse_prompt is False
    wanted = VLMScorer(*llava, DATA)(*rows(MIXED))
    torch.testing.assert_close(scores, wanted, atol=1e-4, rtol=1e-4)


def test_answers_of_one_token_and_models_that_give_all_logits(llava):
    prompt = (0, [0, 1])
    answers = [[5], [7]]
    scorer = VLMScorer(*llava, DATA)
    every = VLMScorer(like(llava[0], AllLogits), llava[1], DATA)
    with torch.inference_mode():
        wanted = scorer._whole(prompt, answers)
        close(every._whole(prompt, answers), wanted, 1e-4)
        for each in (scorer, every):
            close(each._after_cache(each._inputs([prompt]), [answers])[0], wanted, 1e-4)


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
    wanted, found = (VLMScorer(*own, DATA)(*rows(MIXED)) for own in (llava, (model, processor)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("data", "size", "fault"), [(DATA, 0, "batch_size"), (LONELY, 1, "'0'")])
def test_sizes_and_choices_that_make_no_sense_are_refused(llava, data, size, fault):
    with input_error(fault):
        VLMScorer(*llava, data, batch_size=size)(*rows([(0, [0])]))
