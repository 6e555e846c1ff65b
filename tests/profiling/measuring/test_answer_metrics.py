"""Every rule of every metric, by hand; and that an accuracy is one whatever a model says."""

import pytest
from helpers import input_error
from hypothesis import given, settings
from hypothesis import strategies as st

from knobwise.profiling.measuring import answer_metrics as metrics


@pytest.mark.parametrize(
    ("text", "answer"),
    {
        "yes ": "yes ", "": "", "1 < 2": "1 < 2", "say <think>": "say <think>",
        "<think>no</think>\n\nyes\n": "yes", " <think>no": "", "<think></think>": "",
        # the template opened it; and one that thinks twice
        "no</think>yes": "yes", "<think>a</think>b<think>c</think>d": "d",
    }.items(),
)  # fmt: skip
def test_an_answer_is_what_follows_the_last_thought(text, answer):
    assert metrics.without_thoughts(text) == answer
    assert metrics.holds_thoughts(text) == (text != answer)


@pytest.mark.parametrize(
    ("text", "plain"),
    {
        "Yes": "yes", "  two \n dogs\t": "2 dogs", "None": "0", "eleven": "eleven",
        "The cat and a dog, an owl": "cat and dog owl", "dont": "don't", "don’t": "don't",
        "shouldnt've": "shouldn't've", "couldntve": "couldn't've", "yall": "y'all", "oclock": "o'clock",
        "were": "were",  # a word of its own, not "we're"
        "a shell": "shell", "its": "its", "girl's": "girl's", "2:50 pm": "2:50 pm",
        "100,978": "100978", "1,234,567": "1234567", "red,blue": "red blue", "3.50": "3.50",
        "3.": "3", "U.S.A.": "usa", "t-shirt": "t shirt", '"stop"!': "stop", "50%": "50%",
        "$5": "$5",
        "A": "a",  # nothing would be left
        "?": "?", "": "",
    }.items(),
)  # fmt: skip
def test_answers_are_compared_without_what_does_not_matter(text, plain):
    assert metrics.normalise_answer(text) == plain


@pytest.mark.parametrize(
    ("agreeing", "accuracy"), {0: 0, 1: 0.3, 2: 0.6, 3: 0.9, 4: 1, 10: 1}.items()
)
def test_vqa_accuracy_leaves_each_of_ten_references_out_once(agreeing, accuracy):
    # 3 agree: left out is one of them 3 times (2/3 each) and another 7 times (1 each): (3 · 2/3 +
    # 7) / 10 = .9
    references = ["Cats"] * agreeing + [f"other {i}" for i in range(10 - agreeing)]
    assert metrics.vqa_accuracy("cats.", references) == pytest.approx(accuracy)


@pytest.mark.parametrize(
    ("metric", "answer", "references", "accuracy"),
    [
        ("vqa", "Two", ["2"], 1), ("vqa", "two", ["3"], 0),
        ("vqa", "a dog", ["dog", "dog", "dog"], 1),  # both others agree, of 2 there are
        ("vqa", "dog", ["dog", "cat"], 0.5), ("vqa", "dog", ["dog", "dog", "cat"], (0.5 + 0.5 + 1) / 3),
        # after normalisation
        ("exact", "The Two dogs.", ["2 dogs"], 1), ("exact", "dogs", ["dog", "two dogs"], 0),
        # the sign of a number is part of it, though not in VQA evaluation
        ("exact", "5", ["-5"], 0), ("vqa", "5", ["-5"], 1), ("exact", "-5", ["-5"], 1), ("exact", "−$5", ["-$5"], 1),
        ("exact", "minus 5", ["-5"], 1), ("exact", "-.5 m", [".5 m"], 0),
        ("exact", "3-5", ["3 5"], 1), ("exact", "t-shirt", ["t shirt"], 1),  # no sign but a range
        ("anls", "Total:  12", ["total: 12"], 1), ("anls", "abcd", ["abce"], 0.75),
        ("anls", "kitten", ["sitting"], 1 - 3 / 7), ("anls", "sitting", ["kitten"], 1 - 3 / 7),
        ("anls", "ab", ["ac"], 0),  # a distance of exactly half
        ("anls", "abcd", ["wxyz", "abcz"], 0.75),  # the best reference
    ],
)  # fmt: skip
def test_accuracies_by_hand(metric, answer, references, accuracy):
    assert metrics.answer_accuracy(metric, answer, references) == pytest.approx(accuracy)


CHOICES = ("cat", "dog", "black cat", "7")
ANIMALS = ("cat", "dog", "cow", "hen", "fox", "pig", "rat", "bat", "owl")


@pytest.mark.parametrize(
    ("answer", "place"),
    {
        "cat": 0,
        "A cat": 0,  # an article, and all the option says
        "The dog.": 1, "7": 3, "B": 1, "b": 1, "a": 0, "B.": 1, "(B)": 1, "**C**": 2,
        "B) dog": 1,
        "(B) cat": 1,  # the letter counts
        "B: whatever": 1, "b. dog": 1, "The answer is B": 1, "The answer is (B).": 1,
        "the answer is b.": 1, "The correct answer is: D": 3, "Answer: C": 2, "Option D is right": 3,
        "I think it is (b) since it barks": 1, "It must be B, since it barks": 1, "I see a dog here": 1,
        "It is a black cat": 2,  # and not the cat in it
        "A dog is sitting there": 1,  # an article
        "The answer is a dog": 1, "A is right": 0, "answer: b": 1, "Bears eat the cat": 0,
        "A.D. 5": None, "A or B, so a dog": None, "B or C, so a dog": None, "a cat or a dog": None,
        "B or C": None,
        "E": None,  # there is none
        "nothing of that": None, "": None,
    }.items(),
)  # fmt: skip
def test_which_option_an_answer_names(answer, place):
    assert metrics.chosen_option(answer, CHOICES) == place


@pytest.mark.parametrize(
    ("answer", "reference", "right"), [("B", "dog", 1), ("dog", "B", 1), ("cat", "B", 0)]
)
def test_choice_takes_references_as_texts_or_letters(answer, reference, right):
    assert metrics.answer_accuracy("choice", answer, [reference], CHOICES) == right


VITAMINS = ("Vitamin C", "Vitamin A", "Vitamin D", "Vitamin K")
GROUPS = ("Type O", "Type A", "Type B", "Type AB")


@pytest.mark.parametrize(
    ("choices", "answer", "place"),
    [
        (("-1", "1"), "-1", 0), (("-1", "1"), "1.", 1), (("x < 5", "x > 5"), "x > 5.", 1),
        (("x < 5", "x > 5"), "I think that x < 5", 0), (("1/2", "1-2"), "A", 0),
        (("(1, 2)", "(1, -2)"), "(1, 2)", 0),
        (("C", "A", "B"), "C", 0),  # where options are letters themselves their text counts
        (ANIMALS, "I see a dog", 1), (ANIMALS, "It is I.", 8),  # the pronoun is no ninth option
        # a letter that is a word of the option is no label of another
        (VITAMINS, "It is vitamin C.", 0), (VITAMINS, "Vitamin K, I think, not vitamin Q", 3),
        (VITAMINS, "The answer is C", 2), (VITAMINS, "C) Vitamin D", 2), (GROUPS, "It is type A", 1),
        (GROUPS, "It is type B", 2), (GROUPS, "It is type AB", 3), (GROUPS, "It is A", 0),
        (("Option B", "Option A"), "I take option A", 1),
        # what explains the other letters comes after the answer
        (("dog", "cat", "cow"), "**B**\n\nOption A is wrong: it shows a dog.", 1),
        (("dog", "cat", "cow"), "B\n\nExplanation: A is wrong, and C is.", 1),
    ],
)  # fmt: skip
def test_choices_that_marks_letters_or_pronouns_could_confuse_are_distinguished(
    choices, answer, place
):
    assert metrics.chosen_option(answer, choices) == place
    assert metrics.answer_accuracy("choice", answer, [choices[place]], choices) == 1
    assert metrics.answer_accuracy("choice", answer, [choices[1 - place]], choices) == 0


ALIKE = {
    "105": "100", "95": "100", "1.05": "1", "-103": "-100", "−103": "-100", "1,030": "1000", "$51": "50",
    "52%": "50 %", "0.52": "50%", "0": "0.0", "12.": "12", "China": "china ", "1e3": "1000",
}  # fmt: skip
UNLIKE = {
    "105.1": "100", "94.9": "100", "103": "-100", "52": "50%", "0.001": "0", "Chine": "China", "about 100": "100",
}  # fmt: skip


@pytest.mark.parametrize(("pairs", "right"), [(ALIKE, 1), (UNLIKE, 0)])
def test_relaxed_match_of_numbers_and_texts(pairs, right):
    for answer, reference in pairs.items():
        for references in ([reference], ["no", reference]):
            assert metrics.relaxed_match(answer, references) == right, answer


@settings(max_examples=60)
@given(
    metric=st.sampled_from(metrics.METRICS),
    answer=st.text(max_size=12),
    references=st.lists(st.text(max_size=8), min_size=1, max_size=10),
)
def test_an_accuracy_is_between_0_and_1_and_1_for_a_reference_that_all_gave(
    metric, answer, references
):
    choices = tuple(references) if metric == "choice" else ()
    assert 0 <= metrics.answer_accuracy(metric, answer, references, choices) <= 1
    first = references[0]
    same = [first] * len(references)
    assert metrics.answer_accuracy(metric, first, same, choices and (first,)) == 1


@settings(max_examples=40)
@given(text=st.text(max_size=20))
def test_normalising_again_changes_nothing_but_what_was_kept_whole(text):
    once = metrics.normalise_answer(text)
    assert metrics.normalise_answer(once) == once


@pytest.mark.parametrize(
    ("reference", "choices"), [("cat", ()), ("cow", ("cat", "dog")), ("C", ("cat", "dog"))]
)
def test_what_cannot_be_judged_is_refused(reference, choices):
    with input_error("choice"):
        metrics.answer_accuracy("choice", "a", [reference], choices)
