"""The settings that `key=value` arguments stand for, which Hydra composes from `experiments/conf`
and from the dataclasses of every verb."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_original_cwd
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from knobwise.common.checks import RENAMED
from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with
from knobwise.experiments.command_line.flags import (
    DASHES,
    FLAGS,
    in_our_words,
    meaning_of,
    refuse_flags,
)
from knobwise.experiments.command_line.grammar import kinds_of, literal
from knobwise.experiments.settings.choices import CHOICES, CONF, experiments
from knobwise.experiments.settings.options import VERBS
from knobwise.experiments.settings.profiles import PROFILES, group_of_run, of_run
from knobwise.experiments.settings.selector_options import (
    BeamFiles,
    BuiltinBeams,
    ClipLora,
    SmollmBeams,
    StoredEncoder,
)
from knobwise.experiments.settings.words import nearest, typed

READERS: dict[str, dict[str, type[Any]]] = {
    "profile": PROFILES,
    "trained_on": PROFILES,
    "beams": {"builtin": BuiltinBeams, "files": BeamFiles, "smollm2": SmollmBeams},
    "encoder": {"stored": StoredEncoder, "clip": ClipLora},
}
"""The groups whose choices have options of their own."""

FILES = {"profile": "table", "trained_on": "table", "beams": "files"}
"""Groups of what is read, and their choice for a file of any name."""
TABLES = (".csv", ".parquet", ".jsonl", ".gz")
"""How the names of files end that are meant as a profile."""
OF_RUN = "of_run"
"""The choice of such a group that is what the run of a checkpoint was trained on."""
OF_HYDRA = re.compile(
    r"hydra/(launcher|sweeper)=\w+"
    r"|\+*hydra\.(launcher(\.ray\.(init|remote))?|sweep)\.[a-z]\w*=[^${[]*"
)
"""What the command line takes of Hydra. Anything else could name code to import: a callback, a
handler of logs, a `_target_`, a folder of settings."""


def schema_of(verb: str, arguments: Sequence[str]) -> str:
    """Return the key of a verb in `VERBS`. `train` has two, one for controllers and one for
    selectors; the name of the experiment decides."""
    selects = any(
        re.match(r"\+*experiment=(?:\w+\()?['\"]?selector", argument) for argument in arguments
    )
    if verb == "train" and selects:
        return "train_selector"
    return verb


@cache
def register() -> None:
    """Tell Hydra the choices of every group but the experiments, and the settings of every verb."""
    store = ConfigStore.instance()
    for group, readers in READERS.items():
        for name, node in readers.items():
            store.store(group=group, name=name, node=node)
    for group, choices in CHOICES.items():
        for name, choice in choices.items():
            store.store(group=group, name=name, node=choice)
    for verb, node in VERBS.items():
        store.store(name=f"{verb}_schema", node=node)
    # Hydra copies the store with all its schemas for each composition, a fifth of the time, and
    # changes no copy
    ConfigStore.__deepcopy__ = lambda store, memo: store


def choices_of(group: str) -> list[str]:
    """Return the names of all choices of a config group, the experiments included."""
    if group == "experiment":
        return experiments()
    return sorted(READERS.get(group) or CHOICES[group])


@cache
def groups_of(verb: str) -> dict[str, str | None]:
    """Return the groups in the settings of a verb with their default choices."""
    # the names of Hydra's own groups, such as hydra/launcher, have a slash
    choices = composed(verb, [], return_hydra_config=True).hydra.runtime.choices
    return {group: choice for group, choice in choices.items() if "/" not in group}


def question_of(experiment: str) -> str:
    """Return the question that an experiment answers, from the comment below the first line of its
    file; "" without such a file."""
    path = CONF / "experiment" / f"{experiment}.yaml"
    if not path.exists():
        return ""
    # the first line is Hydra's package
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


# -- composing -------------------------------------------------------------------------------------


def read_settings(verb: str, arguments: Sequence[str]) -> Any:
    """Return the settings of a verb, as an instance of its dataclass.

    Raises:
        InputError: an unknown key or group, a value of the wrong type or a missing one.
    """
    words = in_grammar(verb, arguments)
    return settings_of(composed(verb, [*words_of_run(verb, words), *words]))


def in_grammar(verb: str, arguments: Sequence[str], sweep: bool = False) -> list[str]:
    """Return words in which options have today's names, and those that are text hold what was
    typed; see `literal`."""
    renamed = [with_new_name(word) for word in arguments]
    return literal(renamed, text_options(verb), sweep)


def with_new_name(word: str) -> str:
    """Return a word whose option has today's name, see `RENAMED`."""
    name, equals, value = word.partition("=")
    key = name.lstrip("+~")
    return f"{name[: len(name) - len(key)]}{RENAMED.get(key, key)}{equals}{value}"


@cache
def text_options(verb: str) -> dict[str, set[str]]:
    """Return what the options of a verb may hold; see `kinds_of`."""
    return kinds_of(VERBS[verb](), READERS)


def words_of_run(verb: str, arguments: Sequence[str]) -> list[str]:
    """Return the words by which profile, beams and encoder that are not chosen are those of the
    checkpoint's run, so that options change these. The run also says whether there are
    baselines."""
    register()
    checkpoint = getattr(VERBS[verb], "checkpoint", None)
    if checkpoint is None:
        return []
    named = [word for word in arguments if word.startswith("checkpoint=")]
    with explained(verb, named):
        for override in OverridesParser.create().parse_overrides(named):
            # without the backslashes of text, or with what an interpolation stands for
            checkpoint = str(OmegaConf.create({"checkpoint": override.value()}).checkpoint)
    chosen = {word.partition("=")[0] for word in arguments}
    try:
        has_baselines = of_run(checkpoint, "baselines") is not False
    except InputError as error:
        # who names the data needs no such file
        if chosen.isdisjoint(READERS):
            raise InputError(f"{error}; restore a copy, or give profile=… or beams=…") from error
        return []
    words = []
    for group, default in groups_of(verb).items():
        if group in chosen or group not in READERS or default is None:
            continue
        section = "profile" if group == "trained_on" else group
        trained_on = group_of_run(checkpoint, section, READERS[group])
        if trained_on is not None:
            _refuse_code(trained_on, group, chosen)
            ConfigStore.instance().store(group=group, name=OF_RUN, node=trained_on)
            words.append(f"{group}={OF_RUN}")
    if verb == "evaluate" and not has_baselines:
        words.append("baselines=false")
    return words


def _refuse_code(trained_on: DictConfig, group: str, chosen: Set[str]) -> None:
    """Refuse a config of a run that names code, unless the command names it too: a run from
    elsewhere must not choose what is executed.

    Args:
        chosen: the keys that the command sets.
    """
    model = trained_on.get("model") or ""
    if ":" in model and f"{group}.model" not in chosen:
        raise InputError(
            f"{group}.model: the run names {model}, whose code would be executed; if you trust it, "
            f"give {typed(f'{group}.model', model)}"
        )


def composed(verb: str, arguments: Sequence[str], **options: Any) -> DictConfig:
    """Return the config that Hydra composes for a verb, unchecked. `options` are those of
    `hydra.compose`.

    Raises:
        InputError: an unknown key or group, a value of the wrong type.
    """
    register()
    # a value of another kind, such as profile=[1], makes Hydra fail by itself
    mistakes = explained(verb, arguments, TypeError, ValueError)
    with mistakes, initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(verb, with_variants(arguments), **options)


def settings_of(config: DictConfig) -> Any:
    """Return a composed config as an instance of its dataclass.

    Raises:
        InputError: a value that is missing, or that the dataclass refuses.
    """
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key}: must be given") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def with_variants(arguments: Sequence[str]) -> list[str]:
    """Mark arguments whose keys the user chooses, since Hydra does not know these keys: variants,
    and weights by shots. No other key can be added (`+key=value`).

    Raises:
        InputError: an argument that could make Hydra import what it names, such as a callback, or
            read files from outside `CONF`.
    """
    for word in arguments:
        of_hydra = re.search(r"\bhydra\b", word.partition("=")[0])
        if of_hydra and not OF_HYDRA.fullmatch(word):
            raise InputError(
                f"{word}: such a setting can run code, so a command takes only hydra/launcher=… "
                f"and single values of hydra.launcher; put it into a file in {CONF}"
            )
    chosen = re.compile(r"(?:variants|reward\.by_shots)[.=]")
    words = [re.sub(r"^\++(?!hydra\b)", "", argument) for argument in arguments]
    return [f"++{word}" if chosen.match(word) else word for word in words]


def run_hydra(
    verb: str, arguments: Sequence[str], task: Callable[[Any, list[str], list[str]], object]
) -> None:
    """Have Hydra run the jobs of a sweep (`-m`), by the launcher that the arguments name, or answer
    the shell's tab completion (`-sc`).

    Args:
        task: called for each job, in the process that the launcher chose, with its settings, the
            words of its command, and those of them that vary from job to job (if none, all).

    Raises:
        InputError: arguments that Hydra refuses, before the first job starts; or, once all jobs
            are done, the mistake in one of them. Other errors of a job are raised then as well.
    """

    from joblib.parallel import LokyBackend, register_parallel_backend

    # the workers of joblib's launcher end with this process; Ray sees to its own
    workers = partial(LokyBackend, initializer=end_with, initargs=(os.getpid(),))
    register_parallel_backend("loky", workers)

    def job(config: DictConfig) -> None:
        os.chdir(get_original_cwd())  # relative paths refer to it, but workers start elsewhere
        words = list(HydraConfig.get().overrides.task)
        # Hydra writes false as False
        varied = [word for word in words if word.lower() not in common]
        task(settings_of(config), words, varied or words)

    register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    # `hydra.main` reads the words of this process, flags first: it refuses one among the others
    flags = [word for word in arguments if word in FLAGS]
    others = [word for word in arguments if word not in FLAGS]
    sys.argv = ["knobwise", *flags, *with_variants(in_grammar(verb, others, sweep=True))]
    common = {word.lower() for word in sys.argv}
    with explained(verb, arguments):
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=verb)(job)()


def shell_completion(verbs: Iterable[str], arguments: Sequence[str]) -> None:
    """Print what Hydra's tab completion asks for by `-sc`.

    With `install=bash` that is the function for the shell; with `query=bash` all possible ends of
    the line in COMP_LINE, which begins with the program and the verb.
    """
    _, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    verb, is_whole, rest = line.lstrip().partition(" ")
    if "query=" in " ".join(arguments) and not is_whole:
        print(*(name for name in verbs if name.startswith(verb)))
        return
    # Hydra knows programs without verbs
    os.environ["COMP_LINE"] = f"knobwise {rest}"
    schema = schema_of(verb or "train", rest.split())
    with explained(schema, (), ValueError):
        run_hydra(schema, ["-sc", *arguments], lambda *_: None)


# -- mistakes --------------------------------------------------------------------------------------


def check_flags(verb: str, arguments: Sequence[str]) -> None:
    """Refuse words with dashes, and name the options that stand for them.

    Raises:
        InputError: there is such a word.
    """
    if any(word.startswith(tuple(DASHES)) for word in arguments):
        options = options_in(VERBS[verb](), groups_of(verb))
        refuse_flags(verb, arguments, [option.key for option in options])


@contextmanager
def explained(verb: str, arguments: Sequence[str], *errors: type[Exception]) -> Iterator[None]:
    """Raise InputError, with a suggestion, where Hydra refuses the arguments of a verb, or one of
    these errors is raised."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, *errors) as error:
        # lines about our dataclasses and where Hydra looks for files help nobody
        technical = r"(?m)^\s*(full_key|\w+_type|Config search path|provider|To append)\b.*"
        text = re.sub(technical, "", f"{error}\n{error.__cause__ or ''}").strip()
        # a line that ends in a full stop or a colon is explained by the next one
        text = re.sub(r"[.:]\s*\n\s*", ": ", text)
        if isinstance(error, errors):
            # such an error does not say which word it means
            text = f"{' '.join(arguments)}: {text}"
        raise InputError(text + _suggestion(verb, arguments)) from error


def _suggestion(verb: str, arguments: Sequence[str]) -> str:
    """Return `; did you mean …?` for the first argument with an unknown key or choice, or ""."""
    if not arguments:
        return ""
    groups = {**groups_of(verb), "experiment": None}
    names = [option.key for option in options_in(VERBS[verb](), groups)]
    for argument in arguments:
        key, _, value = argument.lstrip("+~-").partition("=")
        if Path(key).suffix in TABLES or os.path.isfile(argument):
            # the file alone
            value = argument
            key = "profile"
        if key in FILES and Path(value).suffix:
            close = [f"{key}={FILES[key]} {typed(f'{key}.path', value)}"]
        elif key in groups:
            close = [f"{key}={name}" for name in get_close_matches(value, choices_of(key), 2)]
        elif key not in names and (words := in_our_words(verb, key, value)):
            # a name of the original's scripts
            return f"; did you mean {words}{meaning_of(words)}?"
        else:
            close = [f"{name}={value}" for name in nearest(key, names)]
        if close and argument not in close and ("," not in value or os.path.isfile(value)):
            return f"; did you mean {' or '.join(dict.fromkeys(close))}?"
    return ""


# -- every option ----------------------------------------------------------------------------------


class Option(NamedTuple):
    """An option as one line of help."""

    key: str
    default: str
    meaning: str
    choice: str = ""
    """The choice of a group that alone has this option, such as `profile=table`; "" for none."""


def field_docs(node: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases, by field name."""
    docs = {}
    for part in reversed(node.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        for statement, text in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def options_in(
    settings: Any, groups: Mapping[str, str | None], prefix: str = ""
) -> Iterator[Option]:
    """Yield every option in an instance of a settings dataclass, with its value as the default;
    for a group the default is its choice in `groups`."""
    docs = field_docs(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        key = f"{prefix}{f.name}"
        meaning = docs[f.name]
        # the entries of a dict explain themselves
        known = [f"`{word}`: {kind.meaning}" for word, kind in f.metadata.get("words", {}).items()]
        if known:
            meaning = f"{meaning} {'; '.join(known)}."
        words = {MISSING: "must be given", "None": "none", "": "empty"}
        default = words.get(str(value), str(value))
        # parts of the value, by the choice that has them; "" for all
        nested = {}
        if is_dataclass(value):
            default = ""
            nested[""] = value
        if f.name in groups and f.name != "experiment":
            default = groups[f.name] or "none"
            meaning = f"Group: {', '.join(choices_of(f.name))}. {meaning}"
            for name, reader in READERS.get(f.name, {}).items():
                nested[f"{key}={name}"] = reader()
        yield Option(key, default, meaning)
        for choice, part in nested.items():
            for option in options_in(part, {}, f"{key}."):
                if option.key != f"{key}.format":
                    yield option._replace(choice=choice)
