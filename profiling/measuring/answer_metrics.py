"""Metrics of answers: each data set has its own, and each gives an accuracy in [0, 1]."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Callable, Sequence

from knobwise.common.errors import InputError

ANLS_THRESHOLD = 0.5
RELAXED_TOLERANCE = 0.05
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
"""The tags around thoughts. Where a chat template opens them, an answer has the second alone."""


def holds_thoughts(text: str) -> bool:
    """Tell whether a text holds a model's thoughts, as where a server does not part them from its
    answers."""
    return END_OF_THOUGHT in text or text.lstrip().startswith(THOUGHT)


def without_thoughts(text: str) -> str:
    """Return the answer in a text: what follows the last thought, "" if that never ends, and the
    text as it is if it holds none."""
    if not holds_thoughts(text):
        return text
    _, ended, answer = text.rpartition(END_OF_THOUGHT)
    return answer.strip() if ended else ""


def answer_accuracy(
    metric: str, answer: str, references: Sequence[str], choices: Sequence[str] = ()
) -> float:
    """Return the accuracy of an answer in [0, 1] by one of `METRICS`.

    Args:
        metric: one of `METRICS`.
        answer: the model's answer.
        references: right answers, at least one; VQA has the answers of ten people, right or not,
            repeats included.
        choices: the options of the metric `choice`, in the order of their letters.

    Raises:
        InputError: `choice` without choices, or with none that is right.
    """
    if metric == "choice":
        return choice_accuracy(answer, references, choices)
    return _BY_REFERENCES[metric](answer, references)


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute VQA accuracy (Antol et al. 2015, https://arxiv.org/abs/1505.00468).

    As in Goyal et al. 2017, it is the mean of min(1, agreeing / 3) over all ways to leave out one
    of the references, where agreeing counts the others only: of ten references 1, 2, 3, 4 that
    agree give .3, .6, .9, 1. Where fewer than three others are left, their number replaces the
    3. A single reference is simply compared.
    """
    plain = normalise_answer(answer)
    right = [normalise_answer(reference) for reference in references]
    if len(right) == 1:
        return float(plain == right[0])
    # leaving out one that agrees leaves one fewer
    agreeing = right.count(plain)
    needed = min(3, len(right) - 1)
    scores = (min(1.0, (agreeing - (reference == plain)) / needed) for reference in right)
    return sum(scores) / len(right)


def normalise_answer(text: str) -> str:
    """Normalise an answer as VQA evaluation does (https://visualqa.org/evaluation.html).

    - lower case, single blanks
    - no comma between digits, and no period but the decimal point
    - the other marks that the evaluation knows become blanks; apostrophe and colon stay
    - numbers up to ten in digits
    - no articles
    - contractions with their apostrophes

    A text of which nothing would be left, such as "A" or "?", only loses its case.

    The evaluation skips all this for a question whose references are all the same; here it is
    never skipped.
    """
    # marks first, since articles and numbers are whole words
    plain = _lower(text.replace("’", "'"))
    bare = re.sub(r"(?<=\d),(?=\d)", "", plain)
    bare = re.sub(r"\.(?!\d)", "", bare).translate(_TO_BLANKS)
    kept = [_SPELLED.get(word, word) for word in bare.split() if word not in _ARTICLES]
    return " ".join(kept) or plain


# $ % & # * and others are not among them: "5%" and "5" are different answers there too
_TO_BLANKS = str.maketrans(dict.fromkeys(';/[]"{}()=+\\_-<>@`,?!', " "))
_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {"none": "0"} | {name: str(digit) for digit, name in enumerate(_NAMES)}
_ARTICLES = ("a", "an", "the")


def _contractions() -> dict[str, str]:
    """Return every contraction by those of its spellings that lack apostrophes.

    Spellings that are words of their own, such as "were", are left out.
    """
    # the endings, and what they are added to
    stems = {
        "n't": "ai are ca could did do does had has have is might must need "
        "ought sha should was were wo would",
        "n't've": "could might must should would",
        "'ve": "i you we they could might must should would not what where who there",
        "'d": "he she i it we you they how who there where somebody someone something that",
        "'d've": "he she i it we you they who there somebody someone something",
        "'ll": "he she it you they how who what why there somebody someone something that",
        "'re": "you they we what why there who",
        "'s": "he she how let somebody someone something that there what when where who why",
    }
    whole = ["i'm", "ma'am", "o'clock", "'twas", "'tis", "y'all", "y'all'll", "y'all'd've"]
    for ending, group in stems.items():
        whole += [stem + ending for stem in group.split()]
    spellings: dict[str, str] = {}
    for contraction in whole:
        # each apostrophe may be there or not
        letters = (("", "'") if letter == "'" else letter for letter in contraction)
        spellings |= dict.fromkeys(map("".join, itertools.product(*letters)), contraction)
    for word in ("id", "wed", "were", "shed", "tis", "hell", "shell", "whore", "lets"):
        del spellings[word]
    return spellings


_SPELLED = _contractions() | _DIGITS
"""Words that are spelled in another way than in the answers that are compared."""


def choice_accuracy(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    """Return 1 if the option that the answer names is a right one, else 0.

    References are options or their letters. Raises InputError for no choices, more than 26, or none
    that is a reference.
    """
    if not 1 <= len(choices) <= len(string.ascii_uppercase):
        raise InputError(f"metric choice: needs 1 to 26 choices, not {len(choices)}")
    right = {_option_alone(reference, choices) for reference in references} - {None}
    if not right:
        raise InputError(
            f"metric choice: none of the choices {list(choices)} is one of {list(references)}"
        )
    return float(chosen_option(answer, choices) in right)


def chosen_option(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option that an answer names, or None for no or several options.

    These are tried in turn, and the first that fits counts:

    1. nothing but the text of an option
    2. nothing but a letter ("b", "B.", "(B)")
    3. a letter before a text ("B) cat", "(B) cat", "B: cat"), or alone on the first line
    4. a letter after "answer", "option" or "choice", or "Answer:"
    5. a single letter in brackets, or a single capital as a word, anywhere in the answer ("A dog"
       and "I see" begin with no letter, "A is" and "A or B" do)
    6. the text of a single option, as whole words, anywhere in the answer; the longest where one
       contains another

    Where 4 or 5 find no more than a letter that is a word of the option that 6 finds, as in "It is
    vitamin C", 6 counts.
    """
    if (option := _option_alone(answer, choices)) is not None:
        return option
    # only letters of options that exist
    last = string.ascii_uppercase[len(choices) - 1]
    capital = f"[A-{last}]"
    either = f"[A-{last}a-{last.lower()}]"
    within = _option_within(answer, choices)
    in_text = re.findall(rf"\b{capital}\b", choices[within]) if within is not None else []
    for pattern in (
        rf"^\s*\(?({either})[).:,](?=\s|$)",
        rf"^[\s(*]*({either})[).:,*]*[^\S\n]*\n",
        r"(?i:answer|option|choice)\b(?:\s+is\b)?\s*:?\s*[(\"'*]*"
        rf"({capital}|{either}(?=[)\"'*.]*\s*$))(?![\w'])",
        rf"\(({either})\)",
        rf"(?<![\w'])({capital})(?![\w'])(?<![AI](?=\s(?!(?:is|or|and|because|since)\b)[a-z]))",
    ):
        letters = {letter.upper() for letter in re.findall(pattern, answer)}
        at_start = pattern.startswith("^")
        if letters and letters <= set(in_text) and not at_start:
            return within
        if len(letters) == 1:
            return ord(letters.pop()) - ord("A")
        if letters:
            return None
    return within


def _option_alone(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option that an answer states, by its text or else by its letter, and
    nothing else."""
    plain, texts = _comparable(answer, choices)
    if plain in texts:
        return texts.index(plain)
    # the letter may stand in brackets or before a mark
    match = re.fullmatch(r"[\s(\[*\"']*([A-Za-z])[\s)\]*\"'.:,]*", answer)
    if match and (index := ord(match[1].upper()) - ord("A")) < len(choices):
        return index
    return None


def _option_within(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the single option whose text occurs in an answer; the longest where one
    contains another."""
    plain, texts = _comparable(answer, choices)
    # whole words only
    within = {index: text for index, text in enumerate(texts) if f" {text} " in f" {plain} "}
    longest = []
    for index, text in within.items():
        if not any(text != other and f" {text} " in f" {other} " for other in within.values()):
            longest.append(index)
    return longest[0] if len(longest) == 1 else None


def _comparable(answer: str, choices: Sequence[str]) -> tuple[str, list[str]]:
    """Simplify an answer and the choices for comparison.

    They keep no more than they must to tell the choices apart, such as "x > 5" from "x < 5".
    """
    texts = list(map(_signed, choices))
    if len(set(texts)) == len(choices):
        return _signed(answer), texts
    answer, *texts = [_lower(text.rstrip(". ")) for text in (answer, *choices)]
    return answer, texts


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer is one of the references, else 0.

    Both are compared as `normalised`, but with the signs of numbers.
    """
    return float(_signed(answer) in map(_signed, references))


def _signed(text: str) -> str:
    """Normalise as `normalised`, but keep the minus of a number: VQA evaluation takes "-5" for
    "5"."""
    return normalise_answer(re.sub(r"(?<![\w.)\]])[-−](?=[$€£]?\.?\d)", "minus ", text))


def anls(answer: str, references: Sequence[str]) -> float:
    """Compute the average normalised Levenshtein similarity of one answer (Biten et al. 2019,
    https://arxiv.org/abs/1905.13648).

    It is the best 1 − distance / longer length over the references, and 0 from a distance of half
    the longer length on. Case and the number of blanks do not count.
    """
    lower = _lower(answer)
    distances = [
        levenshtein(lower, text) / max(len(lower), len(text), 1) for text in map(_lower, references)
    ]
    if min(distances) < ANLS_THRESHOLD:
        return 1 - min(distances)
    return 0.0


def levenshtein(a: str, b: str) -> int:
    """Count the insertions, deletions and replacements of characters that turn `a` into `b`, at
    least."""
    # distances of the letters of a so far to each beginning of b
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal = row[0]
        row[0] = i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def relaxed_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if a number is within 5 % of a reference, or a text equals one but for case, else 0.

    This is the metric of ChartQA (Masry et al. 2022, https://arxiv.org/abs/2203.10244, section
    5.1). Commas in numbers do not count and "5%" is 0.05. The 5 % hold for years too, as they do in
    the original.
    """
    lower = _lower(answer)
    value = _number(answer)
    for reference in references:
        wanted = _number(reference)
        # room for the last bit, so that 1.05 is within 5 % of 1
        tolerance = RELAXED_TOLERANCE * abs(wanted) * (1 + 1e-9)
        if lower == _lower(reference) or abs(value - wanted) <= tolerance:
            return 1.0
    return 0.0


def _number(text: str) -> float:
    """Read a text as a number; NaN, which is close to nothing, if it is none."""
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("−", "-").strip().rstrip(".").strip())
    match = re.fullmatch(r"[$€£]?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?)\s*(%?)", plain)
    if match is None:
        return math.nan
    return float(match[1]) / (100 if match[2] else 1)


def _lower(text: str) -> str:
    return " ".join(text.lower().split())


_BY_REFERENCES: dict[str, Callable[[str, Sequence[str]], float]] = {
    "vqa": vqa_accuracy,
    "exact": exact_match,
    "anls": anls,
    "relaxed": relaxed_match,
}
METRICS = (*_BY_REFERENCES, "choice")
"""The names of the metrics: vqa, exact, anls, relaxed, choice."""
