"""Short questions of many kinds, for demonstrations that a small language model learns from.

    python -m knobwise.testbeds.make.questions --out questions.csv

makes the file that comes with knobwise
(`knobwise.profiling.huggingface.smollm.QUESTIONS_CSV`). It needs the extra `questions`. Facts about
countries are those of countryinfo (MIT), names of languages and countries those of Unicode CLDR in
Babel (Unicode licence, BSD), number words those of num2words (LGPL), plurals those of inflect
(MIT); the other lists are here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from knobwise.common.errors import InputError
from knobwise.common.extras import install_command
from knobwise.common.files import written_whole
from knobwise.testbeds.make import to_out

MAX_QUESTIONS = 90
"""Questions of one kind, at most."""
SEED = 0

WORDS = {
    "nouns": """
        apple baby bag ball bank bird boat book box boy branch bridge brush bus bush cake camera
        car cat chair child church city class clock cloud coat country cow cup daughter day desk
        dish dog door dress ear egg eye face family farm finger fish flag flower foot fork fox
        friend game garden girl glass goose hat head horse house island kitchen knife lady lake
        leaf letter life man match mouse orange party peach pencil piano plate potato shelf ship
        shoe sister story student table thief tomato tooth tree watch wife wolf woman""",
    "past tense": """
        become became begin began bite bit blow blew break broke bring brought build built buy
        bought catch caught choose chose come came draw drew drink drank drive drove eat ate fall
        fell feel felt fight fought find found fly flew forget forgot freeze froze get got give
        gave go went grow grew hear heard hide hid hold held keep kept know knew lead led leave
        left lose lost make made meet met pay paid ride rode ring rang rise rose run ran say said
        see saw sell sold send sent shake shook shoot shot sing sang sink sank sit sat sleep slept
        speak spoke spend spent stand stood steal stole swim swam take took teach taught tear tore
        tell told think thought throw threw understand understood wake woke wear wore win won
        write wrote""",
    "comparative": """
        bad worse big bigger brave braver bright brighter busy busier cheap cheaper clean cleaner
        clever cleverer cold colder cool cooler dark darker deep deeper dirty dirtier dry drier
        early earlier easy easier fast faster fat fatter few fewer fine finer funny funnier good
        better happy happier hard harder heavy heavier high higher hot hotter kind kinder large
        larger late later light lighter long longer loud louder lovely lovelier low lower lucky
        luckier narrow narrower near nearer new newer nice nicer old older poor poorer pretty
        prettier quick quicker quiet quieter rich richer sad sadder safe safer sharp sharper short
        shorter simple simpler slow slower small smaller soft softer strange stranger strong
        stronger sweet sweeter tall taller thick thicker thin thinner warm warmer weak weaker wet
        wetter wide wider wild wilder wise wiser young younger""",
    "chemical symbol": """
        hydrogen H helium He lithium Li beryllium Be boron B carbon C nitrogen N oxygen O fluorine
        F neon Ne sodium Na magnesium Mg aluminium Al silicon Si phosphorus P sulfur S chlorine Cl
        argon Ar potassium K calcium Ca titanium Ti chromium Cr manganese Mn iron Fe cobalt Co
        nickel Ni copper Cu zinc Zn arsenic As bromine Br silver Ag tin Sn iodine I barium Ba
        tungsten W platinum Pt gold Au mercury Hg lead Pb radium Ra uranium U""",
    "young animal": """
        bear cub cat kitten chicken chick cow calf deer fawn dog puppy duck duckling eagle eaglet
        elephant calf fox kit frog tadpole goat kid goose gosling horse foal kangaroo joey lion
        cub owl owlet pig piglet rabbit kit seal pup sheep lamb swan cygnet tiger cub whale calf
        wolf pup""",
    "next day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "next month": """
        January February March April May June July August September October November December""",
}
"""Nouns, pairs of words, and words in their order."""
CONTINENTS = {"Africa", "Americas", "Asia", "Europe", "Oceania"}

Pairs = Iterable[tuple[str, str]]


class Kind(NamedTuple):
    """A kind of question: how it is asked, and what about."""

    name: str
    phrasings: tuple[str, ...]
    """Each with one place for what is asked about."""
    pairs: Pairs
    """What is asked about, and the answer."""


def kinds() -> Iterator[Kind]:
    """Yield all kinds.

    SmolLM2-135M-Instruct solves some of each after two demonstrations of the same kind. Others were
    tried and left out, since it solved none or one of ten: currencies and two-letter codes of
    countries, their names in French, German and Spanish, numbers in French and German, the next
    number, opposites.

    Raises:
        InputError: a package of the extra `questions` is missing.
    """
    try:
        yield from _of_countries()
        yield from _of_numbers()
        yield from _of_words()
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed; run: {install_command('questions')}"
        ) from error


def _of_countries() -> Iterator[Kind]:
    from babel import Locale
    from countryinfo import CountryInfo

    # facts by the names of CLDR; countries that it does not name are left out
    english = Locale("en")
    facts: dict[str, dict[str, Any]] = {}
    for info in CountryInfo.all().values():
        code = str(info.get("ISO", {}).get("alpha2", ""))
        name = english.territories.get(code, "")
        if name.isascii() and name.replace(" ", "").isalpha():
            languages = info.get("languages") or [""]
            facts[name] = {**info, "language": english.languages.get(languages[0])}
            if info.get("region") not in CONTINENTS:
                facts[name].pop("region", None)

    def pairs(fact: str) -> Pairs:
        for name, info in facts.items():
            answer = info.get(fact)
            if answer and answer.isascii() and len(answer) <= 20:
                yield name, answer

    yield Kind(
        "capital",
        ("What is the capital of {}?", "Name the capital city of {}.", "{}: which capital?"),
        pairs("capital"),
    )
    yield Kind(
        "country of a capital",
        ("{} is the capital of which country?", "Name the country whose capital is {}."),
        ((capital, name) for name, capital in pairs("capital")),
    )
    yield Kind(
        "people",
        ("What do you call people from {}?", "A person from {} is", "{}: which nationality?"),
        pairs("demonym"),
    )
    yield Kind(
        "continent",
        ("Which part of the world is {} in?", "Name the continent of {}.", "{}: which continent?"),
        pairs("region"),
    )
    yield Kind(
        "language",
        ("What language is spoken in {}?", "Name the language of {}.", "{}: which language?"),
        pairs("language"),
    )


def _of_numbers() -> Iterator[Kind]:
    from num2words import num2words

    numbers = range(1, 100)
    words = {n: num2words(n) for n in numbers}
    yield Kind(
        "number in words",
        ("Write {} in words.", "How do you spell the number {}?", "{} as a word:"),
        ((str(n), words[n]) for n in numbers),
    )
    yield Kind(
        "number in digits",
        ("Write {} in digits.", "Which number is {}?", "{} as a number:"),
        ((words[n], str(n)) for n in numbers),
    )
    yield Kind(
        "ordinal",
        ("Write number {} as an ordinal.", "What comes in place {}?", "Ordinal of {}:"),
        ((str(n), num2words(n, to="ordinal_num")) for n in numbers),
    )
    yield Kind(
        "number in Spanish",
        ("What is {} in Spanish?", "Say {} in Spanish.", "Spanish for {}:"),
        ((words[n], num2words(n, lang="es")) for n in range(1, 31)),
    )
    yield Kind(
        "sum",
        ("What is {}?", "Add up {}.", "{} ="),
        ((f"{a} + {b}", str(a + b)) for a, b in itertools.combinations(range(1, 15), 2)),
    )


def _of_words() -> Iterator[Kind]:
    import inflect

    words = {name: text.split() for name, text in WORDS.items()}
    nouns = words["nouns"]
    engine = inflect.engine()
    yield Kind(
        "plural",
        ("What is the plural of {}?", "One {}, two", "More than one {}:"),
        ((noun, engine.plural(noun)) for noun in nouns),
    )
    yield Kind(
        "article",
        ("Is it a or an before {}?", "A or an: {}", "Which article goes with {}?"),
        ((noun, engine.a(noun).split()[0]) for noun in nouns),
    )
    yield Kind(
        "first letter",
        ("What is the first letter of {}?", "{} begins with", "Initial of {}:"),
        ((noun, noun[0]) for noun in nouns),
    )
    yield Kind(
        "capital letters",
        ("Write {} in capital letters.", "{} in upper case:", "Shout: {}"),
        ((noun, noun.upper()) for noun in nouns),
    )
    pairs = {
        "past tense": ("What is the past tense of {}?", "Today I {}, yesterday I", "{}, before:"),
        "comparative": ("What is the comparative of {}?", "This is {}, that is even", "Beyond {}:"),
        "chemical symbol": ("What is the symbol of {}?", "Symbol for {}:", "{}: which symbol?"),
        "young animal": ("What is a young {} called?", "The baby of a {} is a", "{}: its young?"),
    }
    for name, phrasings in pairs.items():
        yield Kind(name, phrasings, zip(words[name][::2], words[name][1::2], strict=True))
    for name in ("day", "month"):
        values = words[f"next {name}"]
        following = zip(values, values[1:] + values[:1], strict=True)
        ways = (f"Which {name} comes after {{}}?", f"{{}}, and the {name} after?", "{}, then")
        yield Kind(f"next {name}", ways, following)


def questions(kinds: Iterable[Kind]) -> pl.DataFrame:
    """Return at most `MAX_QUESTIONS` questions of each kind, in random order: id, question, answer,
    question_type, and `part`, which is `query` or `demonstration`.

    Each thing is asked about once before any is asked about again. Things that one part asks about
    are not asked about in the other, in questions of the same kind.
    """
    rng = np.random.default_rng(SEED)
    rows = []
    for kind in kinds:
        pairs = list(dict.fromkeys(kind.pairs))
        order = [pairs[i] for i in rng.permutation(len(pairs))]
        phrasings = [kind.phrasings[i] for i in rng.permutation(len(kind.phrasings))]
        numbered = itertools.islice(
            itertools.product(range(len(phrasings)), enumerate(order)), MAX_QUESTIONS
        )
        for number, (turn, (i, (subject, answer))) in enumerate(numbered):
            question = phrasings[(turn + i // 2) % len(phrasings)].format(subject)
            part = ("query", "demonstration")[i % 2]
            name = f"{kind.name.replace(' ', '-')}-{number}"
            rows.append((name, question, answer, kind.name, part))
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    columns = ["id", "question", "answer", "question_type", "part"]
    return pl.DataFrame(shuffled, columns, orient="row")


def write(out: Path) -> None:
    """Write all questions to a CSV file."""
    frame = questions(kinds())
    with written_whole(out) as temporary:
        frame.write_csv(temporary)
    print(f"{out}: {len(frame)} questions of {frame['question_type'].n_unique()} kinds")


def main() -> None:
    """Write the questions as the command line says."""
    to_out("Make short questions of many kinds.", write)


if __name__ == "__main__":
    main()
