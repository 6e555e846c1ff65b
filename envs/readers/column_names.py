"""What the names of columns say that a file of results has beside its knobs: outcomes, answers, and
numbers of rows.

Nobody can set an outcome, and nobody knows it or the right answer when the knobs are set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import polars as pl

from knobwise.common.errors import InputError

ANSWERS = re.compile(
    r"answers?|((.*_)?golds?|gold(en)?|gt|ground_?truth)(_.*)?|labels?|targets?|ref(erence)?s?"
    r"|expected|truth|solutions?"
    r"|y_true|ideal|(class|human)_(label|answer)s?"
    r"|(true|right|correct|best|expected|ref(erence)?|target)"
    r"_?(answers?|labels?|outputs?|responses?|letters?|class|options?|choices?|text|idx|index)"
    r"(_(id|idx|index|key|letter|text))?"
    r"|(label|answer|target)_(id|idx|index|key|letter|text)|answer_(type|len(gth)?|start)"
    r"|(multiple_choice|short|long|direct|accept(ed|able))_answers?"
    r"|(best|chosen|selected|oracle|winning|optimal|routed|recommended)_"
    r"(models?|config(uration)?|setting|arm|method|algorithm|solver|variant|system)(_.*)?|winner"
)
"""Names of what the right answer is."""
OUTCOMES = re.compile(
    r"((is|was|num|n)_)?(in)?correct|is_right|passed|succeeded|success|failed|wrong|click(ed)?"
    r"|(http_|exit_|response_)?status(_code)?|(exit|return|http)_code|exceptions?|traceback"
    r"|errors?(_(type|code|message|msg|text))?|(has|is)_error|timed_out"
    r"|(finish|stop|fail(ure)?|error)_reason"
    r"|((num|n)_)?(output|completion|generated|response|total)_(tokens?|length|len)"
    r"|tokens_(in|out|generated)|(num_)?predicted(_.*)?|pred_(answer|label|letter|text|class)"
    r"|(raw|model|llm|generated|final|parsed|actual)_(text|output|answer|response|prediction|completion)"
    r"|outputs?|responses?|completions?|generations?|logprobs?|rewards?|judg(e)?ment|verdict"
    r"|host(_?name)?|machine|worker|node|pod|usd|eur|seconds|elapsed|ttft|itl|tpot"
    r"|t?stamp|timestamp|(created|started|finished|measured)_at|(start|end)_time"
)
"""Names of what is known only when the answer is there, and of where and when it was made."""
MEASURED = re.compile(
    r"(?!(max|min|target)_)((.*_)?(cost|price|time|duration|latency|runtime|throughput|score"
    r"|confidence|log_?probs?)|peak_memory|gpu_mem(ory)?|memory_used)"
    r"(_(s|sec|secs|seconds|ms|us|ns|min|mins|minutes|h|hours|usd|eur|mb|gb|j|sum|mean|total))?"
    r"|conf|prob(ability)?|perplexity|tokens_per_(s|sec|second)|tps"
    r"|acc(_norm)?|exact_match|em|f1|bleu|rouge.*|rating|feedback|ok|(is_)?valid|parsed|truncated"
    r"|refused|refusal|finish|done_reason|cache_hit|(is_)?cached|extracted_answer|explanation"
    r"|rationale|.*_content|.*_uuid|pid|date(time)?|(batch|worker|server|machine|gpu|device)_id"
)
"""More names of what is measured; a column of this name may be a feature."""
REPEATS = re.compile(
    r"((random|rng|sampling|shuffle)_)?seed"
    r"|(run|trial|attempt|replicate|repetition|repeat|rep)(_(id|idx|index|no|number))?"
    r"|epoch|(sample|generation)_(idx|index)"
)
"""Names of columns that number measurements of the same setting."""
LABELS = re.compile(r"config(uration)?(_?(id|name|no|nr|number|idx|index|key|hash))?")
"""Names of names of whole configurations."""
SETTINGS = re.compile(
    r"(config|params?|hparams|hyper_?parameters|settings|args)[/.].+", re.IGNORECASE
)
"""Names of settings, as Ray Tune, W&B and MLflow write them."""
UNITS = re.compile(r"(.*_)?units?")
"""Names of columns that say in which unit another one is."""
INDEX = re.compile(r"(unnamed(_\d+)*|index_level_\d+|level_0)?")
"""Names of the columns that pandas makes of its index, as `plain_name` writes them."""
ROW_NUMBERS = re.compile(
    r"idx|index|row|line|nr|no|id|uid|uuid|row_?num(ber)?"
    r"|(row|line)_(id|idx|index|no|nr|num|number)"
    r"|(request|trace|prompt|example|doc|item|query|record|question)_(id|idx|index|no|nr|number)"
)
"""Names of numbers of rows."""
NO_SETTINGS = re.compile(
    r"(data_?set|(sub_?)?task|bench(mark)?|suite|subset|corpus|subject|category|domain|topic"
    r"|eval|source|(test|eval)_?set|scenario|shard|chunk|part|batch|file)"
    r"(_?(name|type|id|idx|index|no|nr|number))?"
)
"""Names of data sets and their parts: what a system is seldom set to."""
JUDGES = re.compile(
    r"metrics?(_name)?|rubric|criteri(on|a)"
    r"|(judge|grader|rater|scorer|annotator|evaluator)(_(name|model|id))?"
)
"""Names of ways to judge an answer, which are no settings either."""
ERRORS = re.compile(
    r"((has|is|api|request)_)?(errors?|exceptions?)(_(type|code|message|msg|text))?|timed_out"
    r"|((http|exit|response|request)_)?status(_code)?|(exit|return|http)_code"
)
"""Names of columns that say whether an answer failed."""
OF_ANSWERS = (ANSWERS, OUTCOMES, MEASURED, re.compile("answers?|pred(iction)?s?|cost|usd|tokens"))
"""What a column of a wide table may hold of one configuration."""


MOST_COLUMNS = 10_000
"""A table with more columns would be looked at for minutes: each takes some 20 ms, however few rows
it has."""


def refuse_width(columns: int) -> None:
    """Raise InputError for a table of so many columns, if these are too many."""
    if columns > MOST_COLUMNS:
        raise InputError(
            f"more than {MOST_COLUMNS:,} columns, each of which takes time and memory to look at; "
            "keep those that are knobs, measurements or features of a few numbers, and give long "
            "vectors as profile.features=FILE.npz"
        )


def plain_name(name: str) -> str:
    """Return a name of a column in lower case, with `_` between its words."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[\W_]+", "_", words.lower()).strip("_") or name.strip()


def named_like(columns: Sequence[str], *patterns: re.Pattern[str]) -> list[str]:
    """Return those of these columns whose names are as one of the patterns says: as a whole, or the
    last part of a name such as `doc.target` or `expected_response/value`."""
    names = {c: (plain_name(c), plain_name(_last_part(c))) for c in columns}
    return [c for c in columns if any(p.fullmatch(name) for name in names[c] for p in patterns)]


def _last_part(name: str) -> str:
    """Return what a nested name ends in, but for `value`; the whole name of a setting."""
    if SETTINGS.fullmatch(name):
        return name
    parts = [part for part in re.split(r"[/.|]", name) if part.strip()]
    if len(parts) > 1 and parts[-1] in ("value", "values"):
        parts.pop()
    return parts[-1] if parts else name


def settings_among(columns: Sequence[str]) -> list[str]:
    """Return those of these columns whose names say that they were set, such as `config/model`."""
    return [c for c in columns if SETTINGS.fullmatch(c)]


def of_configurations(
    samples: pl.DataFrame, columns: Sequence[str], configurations: Sequence[str]
) -> list[str]:
    """Return those of these columns of a wide table that are about single configurations, such as
    `small|cost` beside `large|cost`, or that name the best one.

    Args:
        samples: one row per sample.
        columns: those that may be features.
        configurations: the names of the columns with the accuracies, such as `small_acc`.
    """
    names = {*configurations, *_without_common_ends(configurations)}
    places = {
        name: re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])") for name in names if name
    }
    about: dict[str, set[str]] = {}
    single = []
    for column in columns:
        for name, place in places.items():
            rest, count = place.subn("\0", column)
            if count and rest != "\0":
                about.setdefault(rest, set()).add(column)
                if name in configurations and named_like([rest.strip("\0 _|/.:-")], *OF_ANSWERS):
                    single.append(column)
    outcomes = {*single}.union(*(group for group in about.values() if len(group) > 1))
    for column in columns:
        if samples[column].dtype == pl.String:
            values = samples[column].drop_nulls()
            named = values.filter(values.is_in(list(names)))
            if named.n_unique() > 1 and 2 * len(named) > len(values):
                outcomes.add(column)
    return [c for c in columns if c in outcomes]


def _without_common_ends(names: Sequence[str]) -> list[str]:
    """Return names without the words that all end with, such as `_acc`, and without those that all
    begin with, unless only numbers would be left, which other columns end in too."""
    parts = [re.split(r"([\W_]+)", name) for name in names]
    end = _common(parts, -1)
    parts = [words[: len(words) - end] for words in parts]
    begin = _common(parts, 1)
    stems = ["".join(words[begin:]) for words in parts]
    if any(re.fullmatch(r"[\d.]*", stem) for stem in stems):
        stems = ["".join(words) for words in parts]
    return stems


def _common(parts: Sequence[list[str]], step: int) -> int:
    """Return how many words and separators all begin with, or end with where the step is -1; at
    least one stays in each."""
    columns = zip(*(words[::step] for words in parts), strict=False)
    equal = itertools.takewhile(lambda column: len({*column}) == 1, columns)
    return min(sum(1 for _ in equal), min(map(len, parts)) - 1)


def list_columns(columns: Sequence[str]) -> str:
    """Return names of columns for a note; the index of pandas has none."""
    return ", ".join(name or "one without a name" for name in columns)
