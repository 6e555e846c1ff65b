"""Columns that a file of results has beside its knobs: outcomes, answers, and numbers of rows.

Nobody can set an outcome, and nobody knows it or the right answer when the knobs are set.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from knobwise.envs.readers.column_values import glimpse, holds_no_text, joint_codes
from knobwise.envs.readers.run_states import ENDED, UNENDED, note_unended, states_among
from knobwise.envs.tables.time_outs import time_outs

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
FINE = {"", "none", "null", "nan", "na", "n/a", "false", "0", "no", "okay"}
"""Values of such a column where nothing failed, in lower case."""
FINE_WORDS = rf"^(2\d\d|{ENDED.pattern}|{UNENDED.pattern})$"
"""More of them: 200 and its like, and words for runs."""
MOST_ANSWERED = 0.5
"""Such a value is none of a failure if a larger share of its rows took time and are right."""
SECONDS = np.array([1.42e9, 2.2e9])
"""The years 2015 to 2039, in seconds since 1970."""
MAX_ROWS = 100_000
"""Of a longer table, as many samples are looked at as have about so many rows."""
FEWEST_MEETINGS = 12
"""If fewer are expected, that there are none may be chance."""
FEWEST_IN_GRID = 8
"""The same where all samples have equal settings, which is rarer still."""
MAX_REPEATED = 0.25
"""Where requests were sent again, so many of the expected values of an outcome may meet."""
COMPLETE = 0.9
"""A column that has more of its values in each sample was set, whatever its name says."""
FEWEST_ROWS = 10
"""In fewer rows numbers may be in order, or all different, by chance."""
RANDOM_LETTERS = 6
"""So many letters have times, dates, paths and names of runs that differ in every row."""
FEWEST_VALUES = 30
"""So many values, of which no two samples have one in common, are none that somebody set."""


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


def differs_in_every_row(series: pl.Series) -> bool:
    """Return whether a column holds long values that are all different, as times, dates, paths and
    names of runs are. Nobody could measure such a setting twice."""
    if holds_no_text(series.dtype) or len(series) < FEWEST_ROWS or series.n_unique() < len(series):
        return False
    letters: Any = series.cast(pl.String).str.len_chars().median()
    return letters is not None and letters >= RANDOM_LETTERS


def is_clock(series: pl.Series) -> bool:
    """Return whether all values are times since 1970 of these years, as `created` of an answer is,
    in seconds or a smaller unit. Nobody sets the time."""
    if holds_no_text(series.dtype) or series.dtype == pl.Boolean:
        return False
    for values in (glimpse(series), series.drop_nulls()):
        numbers = values.cast(pl.String).cast(pl.Float64, strict=False)
        inside = [numbers.is_between(*(SECONDS * unit)).all() for unit in (1, 1e3, 1e6, 1e9)]
        if numbers.is_empty() or numbers.null_count() or not any(inside):
            return False
    return True


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


def numbers_of_rows(frame: pl.DataFrame, keys: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """Return those of these columns that number rows: the index of pandas, and whole numbers
    almost without gaps that occur once each.

    Args:
        frame, keys: rows, and their ids; numbers may start anew in every `dataset`.
    """
    numbered = named_like(names, INDEX)
    part = keys["dataset"] if "dataset" in keys.columns else pl.repeat(0, len(keys), eager=True)
    parts = part.n_unique()
    for name in names:
        # numbers of rows are all different, so that most columns need no closer look
        if name in numbered or frame[name].n_unique() * parts < len(frame):
            continue
        rows = pl.DataFrame({"part": part, "number": as_whole_numbers(frame[name])})
        sizes = rows.group_by("part").agg(
            count=pl.len(),
            distinct=pl.col("number").drop_nulls().n_unique(),
            width=pl.col("number").max() - pl.col("number").min() + 1,
        )
        # a few rows may have been removed since
        once = (sizes["distinct"] == sizes["count"]) & (sizes["width"] <= 1.25 * sizes["count"])
        if once.all() and len(frame) >= FEWEST_ROWS * parts:
            numbered.append(name)
    return numbered


def as_whole_numbers(series: pl.Series) -> pl.Series:
    """Return the whole numbers of a column, Int64, null for anything else."""
    if holds_no_text(series.dtype):
        return pl.repeat(None, len(series), dtype=pl.Int64, eager=True)
    text = series.cast(pl.String).str.strip_chars().str.replace(r"\.0+$", "")
    return text.cast(pl.Int64, strict=False)


def failures(
    frame: pl.DataFrame, accuracy: pl.Series, latency: pl.Series, notes: list[str]
) -> pl.Series:
    """Return which rows have no accuracy because the answer failed, bool [n]; notes count them.

    A column of errors, or of how a run ended, says so; or several rows without accuracy took
    equally long, as long as none with accuracy, or as long as other time-outs.
    """
    unscored = accuracy.is_null()
    signs = {f"failed, as {name} says": ~_is_fine(text) for name, text in _statuses(frame).items()}
    longest = float(np.max(latency.fill_null(0).to_numpy(), initial=0))
    slowest = (latency == longest).fill_null(False)
    if 1 < slowest.sum() == (slowest & unscored).sum() and not unscored.all():
        signs[f"took {longest:g}, which is longest, as time-outs do"] = slowest
    times = latency.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    late = time_outs(times, (accuracy.fill_null(0.0) == 0).to_numpy()) & unscored.to_numpy()
    if late.any():
        signs[f"took {times[late].min():g} or a little longer, as time-outs do"] = pl.Series(late)
    failed = pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)
    for sign, rows in signs.items():
        new = unscored & rows & ~failed
        if new.any():
            timed = " if they have a time" * bool((new & latency.is_null()).any())
            notes.append(
                f"{new.sum()} rows without {accuracy.name} {sign}: they count as wrong{timed}"
            )
        failed |= new
    note_unended(frame, accuracy, latency, notes)
    return failed


def is_crashed(
    frame: pl.DataFrame, accuracy: pl.Series, latency: pl.Series, notes: list[str]
) -> pl.Series:
    """Return which rows failed before they took any time or cost, whatever accuracy they have, bool
    [n]; notes count those that have more than 0.

    A column of errors says so, by a value that hardly any answer has: right, and not for nothing.
    """
    nothing = (latency == 0).fill_null(True)
    right = (accuracy > 0).fill_null(False)
    failed = pl.repeat(False, len(frame), dtype=pl.Boolean, eager=True)
    for name, status in _statuses(frame.drop(accuracy.name, strict=False)).items():
        rows = pl.DataFrame({"status": status, "answered": right & ~nothing})
        seldom = rows.select(pl.col("answered").mean().over("status") <= MOST_ANSWERED)["answered"]
        # a fraction is a measure of errors
        fraction = (status.cast(pl.Float64, strict=False) % 1 != 0).fill_null(False)
        new = nothing & seldom & ~(_is_fine(status) | fraction | failed)
        if scored := (new & right & (latency == 0)).sum():
            notes.append(
                f"{scored} rows that took nothing, but have an {accuracy.name} above 0, failed, as "
                f"{name} says: they count as wrong"
            )
        failed |= new
    return failed


def _statuses(frame: pl.DataFrame) -> dict[str, pl.Series]:
    """Return the columns that say whether an answer failed, as text in lower case; "" is empty."""
    statuses = {}
    for name in dict.fromkeys([*named_like(frame.columns, ERRORS), *states_among(frame)]):
        if not holds_no_text(frame[name].dtype):
            text = frame[name].cast(pl.String).str.strip_chars().str.to_lowercase().fill_null("")
            # a code is a float where others are empty
            statuses[name] = text.str.replace(r"^(\d+)\.0+$", "$1")
    return statuses


def _is_fine(status: pl.Series) -> pl.Series:
    """Return where a column of `_statuses` says that nothing failed, bool [n]."""
    return status.is_in(list(FINE)) | status.str.contains(FINE_WORDS)


class Design:
    """The experimental design: which column values co-occur in a sample. Knob values do, outcome
    values never do.

    Whoever measures chooses the knobs. Each sample gets all settings, the same ones as others, or
    some at random; so two settings that differ in one knob alone *meet* in a sample as often as by
    chance. An outcome varies from sample to sample, but has one value for each sample and setting:
    two of its values never meet there, although they do across samples.
    """

    def __init__(
        self,
        frame: pl.DataFrame,
        keys: pl.DataFrame,
        columns: Sequence[str],
        repeats: Sequence[str],
    ) -> None:
        """Look at these columns.

        Args:
            frame, keys: the rows of a table, and their ids.
            columns: what may be knobs; no lists.
            repeats: columns that may number measurements of the same setting.
        """
        # whole samples, the same ones whatever the order of the rows
        step = math.ceil(len(frame) / MAX_ROWS)
        if step > 1:
            names = keys.unique().sort(keys.columns).gather_every(step)
            chosen = keys.with_row_index("row").join(names, on=keys.columns, how="semi")["row"]
            frame = frame[chosen]
            keys = keys[chosen]
        self._sample = _codes(keys)
        datasets = keys.select(c for c in keys.columns if c == "dataset")
        self._dataset = _codes(datasets) if datasets.width else np.zeros(len(frame), np.int64)
        self._values = {name: _codes(frame.select(name)) for name in columns}
        complete = [
            self._values[name]
            for name in columns
            if name not in repeats and self.size(name) > 1 and self.regularity(name) == 1
        ]
        sample = self._sample
        for name in repeats:
            number = _codes(frame.select(name))
            # a run of one setting, such as one model, is a repeat of nothing: only its rank among
            # the runs of that setting tells measurements apart
            fixed = [values for values in complete if _is_function(number, values, sample)]
            if fixed:
                number = _rank_within(joint_codes(self._sample, *fixed), number)
            numbered = joint_codes(sample, number)
            # a number for each row says nothing
            if 2 * (1 + numbered.max()) <= len(frame):
                sample = numbered
        self._sample = joint_codes(sample)

    def size(self, column: str) -> int:
        """Return how many values a column has."""
        return int(self._values[column].max()) + 1

    def regularity(self, column: str) -> float:
        """Return in which share of the samples the column has the values, and each as often, that
        it has in most samples."""
        weights = np.random.default_rng(0).integers(1, 1 << 62, self.size(column), np.uint64)
        sums = np.zeros(self._sample.max() + 1, np.uint64)
        np.add.at(sums, self._sample, weights[self._values[column]])
        return float(np.unique(sums, return_counts=True)[1].max() / len(sums))

    def cooccurrences(self, columns: Sequence[str], knobs: Sequence[str]) -> tuple[int, float]:
        """Count pairs of distinct column values within a sample at equal knobs.

        Returns:
            How many there are, and how many there would be if each sample had got its settings at
            random. Both agree where all samples have the same settings.
        """
        setting = joint_codes(self._dataset, *(self._values[knob] for knob in knobs))
        both = joint_codes(setting, *(self._values[column] for column in columns))
        # a setting that was measured again counts once
        rows = np.unique(joint_codes(self._sample, both), return_index=True)[1]
        sample = self._sample[rows]
        setting = setting[rows]
        both = both[rows]
        dataset = self._dataset[rows]

        def pairs(*codes: np.ndarray) -> np.ndarray:
            """Return how many pairs of rows of each data set are equal in these."""
            _, first, count = np.unique(joint_codes(*codes), return_index=True, return_counts=True)
            return np.bincount(dataset[first], count * (count - 1) / 2, self._dataset.max() + 1)

        met = pairs(sample, setting)
        in_sample = pairs(sample)
        same = pairs(both)
        # the same of rows of different samples
        across = pairs(dataset) - in_sample
        differ = pairs(setting) - same - met
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = np.nan_to_num(in_sample * differ / (across - same))
        return int(met.sum()), float(expected.sum())

    def are_outcomes(
        self, columns: Sequence[str], knobs: Sequence[str], fewest: int = FEWEST_MEETINGS
    ) -> bool:
        """Return whether values of columns meet far less often than chosen ones would, where these
        knobs are equal. If fewer than `fewest` are expected, that none meet may be chance."""
        met, expected = self.cooccurrences(columns, knobs)
        surely = expected - met >= math.sqrt(fewest * expected) > 0
        return surely and met <= MAX_REPEATED * expected

    def suspicious(self, knobs: Sequence[str]) -> list[str]:
        """Return the supposed knobs that look like outcomes: within a sample, and with the other
        knobs fixed, they almost never take two values. With few rows that may be chance."""
        regular = [c for c in knobs if self.regularity(c) == 1]
        suspicious: list[str] = []
        for column in knobs:
            for others in ([c for c in knobs if c != column], regular):
                met, expected = self.cooccurrences([column], others)
                if column not in (*regular, *suspicious) and met <= MAX_REPEATED * expected > 0:
                    suspicious.append(column)
        return suspicious

    def _is_shared(self, column: str) -> bool:
        """Return whether a value of a column occurs in two samples."""
        values = self._values[column]
        return len(np.unique(joint_codes(self._sample, values))) > values.max() + 1

    def is_complete(self, column: str, knobs: Sequence[str]) -> bool:
        """Return whether samples have several values of a column where these knobs are equal, and
        nearly all that there are."""
        setting = joint_codes(self._dataset, *(self._values[knob] for knob in knobs))
        both = joint_codes(setting, self._values[column])
        _, first = np.unique(both, return_index=True)
        values = np.bincount(setting[first])
        _, cells = np.unique(joint_codes(self._sample, setting), return_index=True)
        measured = len(np.unique(joint_codes(self._sample, both)))
        return measured > max(len(cells), COMPLETE * values[setting[cells]].sum())

    def knobs_among(self, columns: Sequence[str]) -> list[str]:
        """Return those of these columns that are no outcomes, in their order."""
        regular = [c for c in columns if self.regularity(c) == 1]
        others = [c for c in columns if c not in regular]
        if self.are_outcomes(others, regular, FEWEST_IN_GRID):
            # they suffice; what follows from them may be another name of a setting
            return [c for c in columns if c in regular or not self.cooccurrences([c], regular)[1]]
        order = sorted(others, key=lambda c: (-self.regularity(c), self.size(c)))
        # what differs in all samples was not set; what few samples have may be an outcome
        order = [c for c in order if self.size(c) < FEWEST_VALUES or self._is_shared(c)]
        knobs = list(regular)
        # an outcome that came first may have hidden a knob, so look twice
        for _ in range(2):
            for column in order:
                if column not in knobs and not self.are_outcomes([column], knobs):
                    knobs.append(column)
            for column in reversed(order):
                rest = [c for c in knobs if c != column]
                if column in knobs and self.are_outcomes([column], rest):
                    knobs = rest
        return [c for c in columns if c in knobs]


def _is_function(number: np.ndarray, values: np.ndarray, sample: np.ndarray) -> bool:
    """Return whether rows of a sample with equal numbers have equal values, int64 [n] each."""
    numbered = joint_codes(sample, number)
    return int(joint_codes(numbered, values).max()) == int(numbered.max())


def _rank_within(group: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the rank of each number among the different ones of its group, int64 [n] each."""
    pairs, index = np.unique(np.stack([group, number]), axis=1, return_inverse=True)
    first = np.searchsorted(pairs[0], pairs[0])
    return (np.arange(pairs.shape[1]) - first)[index.reshape(-1)]


def _codes(columns: pl.DataFrame) -> np.ndarray:
    """Return a number for each row, int64 [n]; rows with equal values have the same."""
    codes = [
        column.cast(pl.String).fill_null("").rank("dense").to_numpy().astype(np.int64) - 1
        for column in columns
    ]
    return joint_codes(*codes)
