"""The settings that `key=value` words stand for. Hydra composes them from config groups; each
mistake becomes one line that says what is wrong and what is probably meant."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import (
    MISSING,
    BooleanNode,
    DictConfig,
    FloatNode,
    IntegerNode,
    ListConfig,
    OmegaConf,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from knobwise.agents.controller.settings import EXPERTS, PolicyConfig
from knobwise.agents.training.settings import OptimiserConfig
from knobwise.common.errors import InputError
from knobwise.envs.configurations.settings import TRAINING_REWARD, BudgetConfig, RewardConfig
from knobwise.experiments.settings.options import EXPERIMENTS, VERBS
from knobwise.experiments.settings.profiles import PROFILES, of_run, profile_of_run
from knobwise.experiments.settings.selector_options import (
    BeamFiles,
    BuiltinBeams,
    ClipLora,
    StoredEncoder,
)
from knobwise.experiments.settings.tracking import TrackingSettings
from knobwise.losses.settings import LossConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
ABOUT_HYDRA = r"[+~]*hydra[./]"
"""The start of a word that sets an option of Hydra itself, such as the launcher of a sweep."""
MULTIRUN = ("-m", "--multirun")

_POLICY = PolicyConfig(teacher=True, members=5, hidden=0, dropout=0.0, drift=0.3)
_OPTIMISER: dict[str, Any] = {
    "warmup_iterations": 600,
    "warmup_lr": 3e-3,
    "iterations": 400,
    "lr": 3e-4,
    "patience": 10,
    "contexts": 256,
    "minibatch": 128,
    "epochs": 2,
}

GROUPS: dict[str, dict[str, Any]] = {
    "profile": PROFILES,
    "trained_on": PROFILES,
    "beams": {"builtin": BuiltinBeams, "files": BeamFiles},
    "encoder": {"stored": StoredEncoder, "clip": ClipLora},
    "budget": {
        **{name: BudgetConfig(strategy=name) for name in ("quantiles", "relative", "fixed")},
        "uniform": BudgetConfig(strategy="uniform"),
        **{sense: BudgetConfig(sense=sense) for sense in ("mean", "weights")},
    },
    "reward": {
        "utility": replace(TRAINING_REWARD),
        "shaped": RewardConfig(kind="shaped"),
        "function": RewardConfig(kind="function", function=MISSING),
    },
    "policy": {
        "auto": replace(_POLICY, experts=EXPERTS),
        "utility": _POLICY,
        "independent": PolicyConfig(guard=False),
    },
    "loss": {
        name: LossConfig(objective=name, group_size=16) for name in ("exact", "sampled", "ppo")
    },
    # what suits each policy, under its name
    "optimiser": {
        **{name: OptimiserConfig(**_OPTIMISER) for name in ("auto", "utility")},
        "independent": OptimiserConfig(),
    },
    "tracking": {
        name: TrackingSettings(mode=name) for name in ("auto", "offline", "online", "disabled")
    },
}
_DEFAULTS = {
    "profile": "builtin",
    "budget": "quantiles",
    "reward": "utility",
    "policy": "auto",
    "loss": "sampled",
}
_DEFAULTS |= {"optimiser": "${policy}", "tracking": "auto", "beams": "builtin"}
_DEFAULTS |= {"trained_on": "builtin", "encoder": "stored"}
GROUPS_OF = {
    "train": ("profile", "budget", "reward", "policy", "loss", "optimiser", "tracking"),
    "train_selector": ("beams", "encoder", "tracking"),
    "inspect": ("profile",),
    "evaluate": ("profile", "reward", "beams", "encoder"),
    "explain": ("profile",),
    "profile": (),
    "export": ("profile",),
    "update": ("profile", "trained_on", "tracking"),
    "compare": (),
    "workspace": (),
}
"""The groups in the settings of each verb."""

# a run has its own folder and config.yaml, so Hydra writes none
HYDRA = {
    "run": {"dir": "."},
    "sweep": {"dir": "${runs}/multirun", "subdir": "."},
    "sweeper": {"params": {}},
    "output_subdir": None,
    "job": {"chdir": False},
}
SWEEP = "sweep"
"""The config that Hydra launches the jobs of a sweep by: each job is one value of `job`."""


def schema_of(verb: str, words: Sequence[str]) -> str:
    """The key in `VERBS`: `train` has a schema for controllers and one for selectors, by the
    experiment's name."""
    selects = any(re.match(r"\+*experiment=(?:\w+\()?['\"]?selector", word) for word in words)
    if verb == "train" and selects:
        return "train_selector"
    return verb


@cache
def register() -> None:
    """Tell Hydra the groups and the verbs."""
    store = ConfigStore.instance()
    for group, options in GROUPS.items():
        for name, node in options.items():
            store.store(group=group, name=name, node=node)
    for verb, node in VERBS.items():
        # a group whose field is None may be left out
        choices = {
            group: None if getattr(node, group, "") is None else _DEFAULTS[group]
            for group in GROUPS_OF[verb]
        }
        defaults: list[Any] = [{group: choice} for group, choice in choices.items()]
        if verb in EXPERIMENTS:
            defaults.append({"experiment": EXPERIMENTS[verb]})
        store.store(name=f"{verb}_schema", node=node)
        store.store(
            name=verb, node={"defaults": [f"{verb}_schema", *defaults, "_self_"], "hydra": HYDRA}
        )
    store.store(name=SWEEP, node={"runs": "runs", "job": 0, "hydra": HYDRA})


def experiments() -> list[str]:
    """The names of all experiment files."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def question_of(experiment: str) -> str:
    """The question that an experiment answers, from the comment below the first line of its
    file."""
    lines = (
        (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    )
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment)


# -- composing -------------------------------------------------------------------------------------


def read_settings(verb: str, words: Sequence[str]) -> Any:
    """The settings of a verb, as an instance of its dataclass. A profile that is not given is that
    of the checkpoint's run, which also says whether there are baselines. Raises InputError: an
    unknown key or group, a value of the wrong type or a missing one, an option of sweeps."""
    for word in words:
        if re.match(ABOUT_HYDRA, word):
            raise InputError(
                f"{word}: launchers and Hydra's other options are for sweeps; add -m (knobwise "
                "train -m …)"
            )
    check_flags(verb, words)
    try:
        settings: Any = OmegaConf.to_object(composed(verb, words))
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} must be given") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    except ValueError as error:  # a dataclass refuses a value
        raise InputError(str(error)) from error
    for group in {"profile", "trained_on"} & {*GROUPS_OF[verb]}:
        is_named = (
            any(re.match(rf"{group}[=.]", word) for word in words)
            or getattr(settings, group) is None
        )
        if hasattr(settings, "checkpoint") and not is_named:
            setattr(
                settings, group, profile_of_run(settings.checkpoint) or getattr(settings, group)
            )
    if verb == "evaluate" and not any(word.startswith("baselines=") for word in words):
        settings.baselines = of_run(settings.checkpoint, "baselines") is not False
    return settings


def composed(verb: str, words: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """The config that Hydra composes, unchecked; with Hydra's own options if `with_hydra`. Raises
    InputError: an unknown key or group, a value of the wrong type."""
    with _explaining(verb, words):
        return compose(verb, with_variants(words), return_hydra_config=with_hydra)


def parsed(words: Sequence[str]) -> list[Override]:
    """`key=value` words as Hydra reads them. Raises InputError for a word that cannot be read."""
    with _explaining("train", words):
        loader = GlobalHydra.instance().config_loader()  # knows what `glob` stands for
        return list(OverridesParser.create(loader).parse_overrides(list(words)))


@contextmanager
def _explaining(verb: str, words: Sequence[str]) -> Iterator[None]:
    """A block in which Hydra knows all settings, and whose errors become an InputError."""
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, OSError, TypeError, ValueError) as error:
        raise InputError(_explained(verb, words, error)) from error


def shell_completion(verbs: Iterable[str], words: Sequence[str]) -> None:
    """Print what Hydra's tab completion asks for by `-sc`: with `install=bash` the function for the
    shell; with `query=bash` what may end the line in COMP_LINE, which begins with the program and
    the verb."""
    _, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    verb, is_whole, rest = line.lstrip().partition(" ")
    if "query=" in " ".join(words) and not is_whole:
        print(*(name for name in verbs if name.startswith(verb)))
        return
    os.environ["COMP_LINE"] = f"knobwise {rest}"
    with _explaining("train", ()):
        GlobalHydra.instance().hydra.shell_completion(schema_of(verb, rest.split()), list(words))


def with_variants(words: Sequence[str]) -> list[str]:
    """Mark what has keys of the user's choice, which are new to Hydra: variants, and weights by
    shots."""
    return [
        f"++{word}" if re.match(r"(variants|reward\.by_shots)[.=]", word) else word
        for word in words
    ]


# -- every option ----------------------------------------------------------------------------------


class Option(NamedTuple):
    """One line of help."""

    key: str
    default: str
    meaning: str
    choice: str = ""
    """`profile=table` for an option that only this choice of a group has."""


def field_docs(node: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases, by the field's name."""
    docs: dict[str, str] = {}
    for part in reversed(node.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        for statement, text in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def options_in(settings: Any, groups: Sequence[str] = (), prefix: str = "") -> Iterator[Option]:
    """Every option in an instance of a settings dataclass, with its value there as the default."""
    docs = field_docs(type(settings))
    for f in fields(settings):
        value = getattr(settings, f.name)
        key = f"{prefix}{f.name}"
        if f.name in groups:
            docs[f.name] = f"Group: {', '.join(GROUPS[f.name])}. {docs[f.name]}"
        if f.name in groups and f.name in ("profile", "trained_on", "beams", "encoder"):
            # each choice has options of its own
            yield Option(key, "none" if value is None else _DEFAULTS[f.name], docs[f.name])
            for name, node in GROUPS[f.name].items():
                for option in options_in(node(), prefix=f"{key}."):
                    if option.key != f"{key}.format":
                        yield option._replace(choice=f"{key}={name}")
        elif is_dataclass(value):
            if f.name in groups:
                default = _DEFAULTS[f.name].replace("${policy}", "that of policy")
            else:
                default = ""
            yield Option(key, default, docs[f.name])
            yield from options_in(value, prefix=f"{key}.")
        else:
            default = {MISSING: "must be given", "None": "none"}.get(str(value), str(value))
            yield Option(key, default, docs[f.name])


@cache
def schema_options(verb: str) -> dict[str, Option]:
    """Every option of a verb by its key, with the defaults before groups and experiments are
    applied."""
    options: dict[str, Option] = {}
    for option in options_in(VERBS[verb](), GROUPS_OF[verb]):
        earlier = options.get(option.key)
        if earlier:
            choice = f"{earlier.choice} or {option.choice}"
        else:
            choice = option.choice
        options[option.key] = option._replace(choice=choice)
    return options


# -- mistakes --------------------------------------------------------------------------------------


def check_flags(verb: str, words: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Refuse `--key value`, `+key=value` and the like. Raises InputError: with the same as
    key=value, where the key is known."""
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="-"):
        if (
            not word.startswith(("-", "+", "~"))
            or word in allowed
            or re.match(r"[+~]+(hydra|variants)[./]", word)
        ):
            continue
        key, equals, value = word.lstrip("-+~").partition("=")
        if not equals:
            if "=" in following or following.startswith("-"):
                value = "true"
            else:
                value = following
        if word.startswith("-") and len(key) > 1:
            known = list(schema_options(verb))
        else:
            known = []
        same = [f"{name}={value}" for name in _nearest(key.replace("-", "_"), known)]
        if same:
            hint = f": try {' or '.join(same)}"
        else:
            hint = f" {_listed_by(verb)}"
        if word in MULTIRUN:
            hint = "; only knobwise train has sweeps"
        raise InputError(f"{word}: options are key=value, not --flags{hint}")


def _explained(verb: str, words: Sequence[str], error: Exception) -> str:
    """One line for what Hydra or OmegaConf refuse in the words of a command."""
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override).removeprefix("++"))
    overrides = OverridesParser.create().parse_overrides(list(words))
    options = schema_options(verb)
    for override in overrides:
        word = str(override.input_line)
        key = override.key_or_group
        value = word.partition("=")[2]
        if key == "experiment":
            choices: Any = experiments()
        elif key in GROUPS_OF[verb]:
            choices = GROUPS[key]
        else:
            choices = None
        if not key:
            return _unreadable(word)
        if override.is_sweep_override():
            return _several_values(verb, key, value)
        if choices is not None and value.strip("'\"") not in choices:
            return _no_such_choice(key, value.strip("'\""), choices)
        if choices is None and key not in options and not re.match(r"hydra[./]|variants[.]", key):
            suggestions = [f"{name}={value}" for name in _nearest(key, list(options))]
            return (
                f"{word}: there is no such "
                f"option{_did_you_mean(suggestions, f' {_listed_by(verb)}')}"
            )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return _no_such_choice(group, choice, error.options or ())
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", "") or "").split("[")[0]
    word = next(
        (str(o.input_line).lstrip("+") for o in reversed(overrides) if o.key_or_group == full_key),
        full_key,
    )
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and full_key in options:
        return f"{word}: is an option of {options[full_key].choice}; give that too"
    if isinstance(cause, ValidationError):
        return _wrong_type(word, cause)
    return _first_line(cause)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _listed_by(verb: str) -> str:
    command = verb.replace("_", " experiment=")
    return f"(`knobwise {command} --help` lists every option)"


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Keys that a mistyped one may stand for: spelt almost alike, else with the same last part
    (`optimiser.lr` for `lr`), else spelt somewhat alike."""
    same_end = [name for name in keys if "." in name and name.split(".")[-1] == key.split(".")[-1]]
    if same_part := [
        name for name in keys if "." in key and name.startswith(f"{key.split('.')[0]}.")
    ]:
        keys = same_part  # `loss.baseline` is not `baselines`
    alike = get_close_matches(key, keys, n=1, cutoff=0.8)
    return alike or same_end[:3] or get_close_matches(key, keys, n=1)


def _did_you_mean(suggestions: Iterable[str], end: str) -> str:
    """`; did you mean a or b?`, or `end` where there is nothing to suggest."""
    text = " or ".join(suggestions)
    return f"; did you mean {text}?" if text else end


def _unreadable(word: str) -> str:
    """What is wrong with a word that Hydra's grammar cannot read."""
    if "=" not in word and Path(word).suffix in (
        ".csv",
        ".parquet",
        ".jsonl",
        ".ndjson",
        ".gz",
        ".safetensors",
    ):
        return f"{word}: options are key=value; did you mean profile=table profile.path={word}?"
    if not re.match(r"[+~]*[\w./@-]+=", word):
        return f"{word!r}: is not of the form key=value, such as policy.hidden=48"
    return (
        f"{word!r}: this value cannot be read; quote a value with blanks or "
        "brackets twice: 'key=\"a (1)\"'"
    )


def _several_values(verb: str, key: str, values: str) -> str:
    """What is wrong with `key=a,b` outside a sweep."""
    if verb.startswith("train"):
        sweep = f"; -m makes a run for each: knobwise train -m {key}={values}"
    else:
        sweep = ""
    if key in schema_options(verb) and schema_options(verb)[key].default.startswith(("[", "(")):
        return f"{key}={values}: a list is {key}=[{values}]{sweep}"
    return (
        f"{key}={values}: takes one value{sweep}; quote a comma inside "
        f"a text twice: '{key}=\"a,b\"'"
    )


def _no_such_choice(group: str, choice: str, choices: Iterable[str]) -> str:
    """What is wrong with `group=choice`; a file may be meant to be read."""
    reader = {"profile": "table", "trained_on": "table", "beams": "files"}.get(group)
    if reader is not None and (Path(choice).suffix or "/" in choice):
        return f"{group}={choice}: is a file; did you mean {group}={reader} {group}.path={choice}?"
    names = list(choices)
    suggestions = [f"{group}={name}" for name in get_close_matches(choice, names, n=1)]
    if suggestions:
        problem = f"does not exist{_did_you_mean(suggestions, '')}"
    else:
        problem = f"must be one of {', '.join(names)}"
    return f"{group}={choice}: {problem}"


def _wrong_type(word: str, cause: ValidationError) -> str:
    """What is wrong with `key=value`, by the node of OmegaConf that it was meant for."""
    key, _, value = word.partition("=")
    node = cause.child_node
    if cause.value is None:
        return f"{key}=null: must have a value"
    if isinstance(node, DictConfig):
        return f"{word}: {key} is a section; its options are {key}.…"
    if isinstance(node, ListConfig) or "ListConfig" in _first_line(
        cause
    ):  # a list that is null has no such node
        return f"{word}: must be a list, {key}=[{value or '…'}]"
    kinds = {BooleanNode: "true or false", IntegerNode: "a whole number", FloatNode: "a number"}
    kind = next((name for kind, name in kinds.items() if isinstance(node, kind)), None)
    if kind:
        return f"{word}: must be {kind}"
    return f"{word}: {_first_line(cause)}"
