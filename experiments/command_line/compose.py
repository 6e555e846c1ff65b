"""The settings that `key=value` arguments stand for. Hydra composes them from config groups. Each
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
"""The start of an argument that sets an option of Hydra itself, such as the launcher of a sweep."""
MULTIRUN = ("-m", "--multirun")
"""The flags that start a sweep."""

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
        "mean": BudgetConfig(sense="mean"),
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
"""The config that Hydra launches the jobs of a sweep with; each job is one value of `job`."""


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
    """Return the names of all experiment files."""
    return sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def question_of(experiment: str) -> str:
    """Return the question that an experiment answers, from the comment below the first line of its
    file."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    return " ".join(line.removeprefix("#").strip() for line in comment)


# -- composing -------------------------------------------------------------------------------------


def read_settings(verb: str, arguments: Sequence[str]) -> Any:
    """Return the settings of a verb, as an instance of its dataclass.

    A profile that is not given is that of the checkpoint's run, which also says whether there are
    baselines.

    Raises:
        InputError: an unknown key or group, a value of the wrong type or a missing one, an option
            of sweeps.
    """
    for argument in arguments:
        if re.match(ABOUT_HYDRA, argument):
            raise InputError(
                f"{argument}: launchers and Hydra's other options are for sweeps; add -m (knobwise "
                "train -m …)"
            )
    check_flags(verb, arguments)
    try:
        settings: Any = OmegaConf.to_object(composed(verb, arguments))
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key} must be given") from error
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    except ValueError as error:  # a dataclass refuses a value
        raise InputError(str(error)) from error
    if hasattr(settings, "checkpoint"):
        for group in {"profile", "trained_on"} & {*GROUPS_OF[verb]}:
            default = getattr(settings, group)
            is_named = any(re.match(rf"{group}[=.]", argument) for argument in arguments)
            if default is not None and not is_named:
                setattr(settings, group, profile_of_run(settings.checkpoint) or default)
    if verb == "evaluate" and not any(argument.startswith("baselines=") for argument in arguments):
        settings.baselines = of_run(settings.checkpoint, "baselines") is not False
    return settings


def composed(verb: str, arguments: Sequence[str], with_hydra: bool = False) -> DictConfig:
    """Return the config that Hydra composes, unchecked; with Hydra's own options if `with_hydra`.

    Raises:
        InputError: an unknown key or group, a value of the wrong type.
    """
    with _explaining(verb, arguments):
        return compose(verb, with_variants(arguments), return_hydra_config=with_hydra)


def parsed(arguments: Sequence[str]) -> list[Override]:
    """Return `key=value` arguments as Hydra reads them. Raises InputError for one that it cannot
    read."""
    with _explaining("train", arguments):
        loader = GlobalHydra.instance().config_loader()  # knows what `glob` stands for
        return list(OverridesParser.create(loader).parse_overrides(list(arguments)))


@contextmanager
def _explaining(verb: str, arguments: Sequence[str]) -> Iterator[None]:
    """Run a block in which Hydra knows all settings, and turn its errors into an InputError."""
    register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException, OSError, TypeError, ValueError) as error:
        raise InputError(_explained(verb, arguments, error)) from error


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
    os.environ["COMP_LINE"] = f"knobwise {rest}"
    with _explaining("train", ()):
        GlobalHydra.instance().hydra.shell_completion(
            schema_of(verb, rest.split()), list(arguments)
        )


def with_variants(arguments: Sequence[str]) -> list[str]:
    """Mark arguments whose keys the user chooses, since Hydra does not know these keys: variants,
    and weights by shots."""
    return [
        f"++{argument}" if re.match(r"(variants|reward\.by_shots)[.=]", argument) else argument
        for argument in arguments
    ]


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
    docs: dict[str, str] = {}
    for part in reversed(node.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        for statement, text in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(statement.target)] = " ".join(ast.literal_eval(text.value).split())
    return docs


def options_in(settings: Any, groups: Sequence[str] = (), prefix: str = "") -> Iterator[Option]:
    """Yield every option in an instance of a settings dataclass, with its value as the default."""
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
    """Return every option of a verb by its key, with the defaults before groups and experiments are
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


def check_flags(verb: str, arguments: Sequence[str], allowed: Sequence[str] = ()) -> None:
    """Refuse `--key value`, `+key=value` and the like. Raises InputError, which suggests key=value
    where the key is known."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        if (
            not argument.startswith(("-", "+", "~"))
            or argument in allowed
            or re.match(r"[+~]+(hydra|variants)[./]", argument)
        ):
            continue
        key, equals, value = argument.lstrip("-+~").partition("=")
        if not equals:
            if "=" in following or following.startswith("-"):
                value = "true"
            else:
                value = following
        if argument.startswith("-") and len(key) > 1:
            known = list(schema_options(verb))
        else:
            known = []
        same = [f"{name}={value}" for name in _nearest(key.replace("-", "_"), known)]
        if same:
            hint = f": try {' or '.join(same)}"
        else:
            hint = f" {_listed_by(verb)}"
        if argument in MULTIRUN:
            hint = "; only knobwise train has sweeps"
        raise InputError(f"{argument}: options are key=value, not --flags{hint}")


def _explained(verb: str, arguments: Sequence[str], error: Exception) -> str:
    """Return one line for what Hydra or OmegaConf refuse in the arguments of a command."""
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override).removeprefix("++"))
    overrides = OverridesParser.create().parse_overrides(list(arguments))
    options = schema_options(verb)
    # mistakes that an argument shows by itself
    for override in overrides:
        if problem := _problem(verb, override):
            return problem
    # else the error says which key or group it is about
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return _no_such_choice(group, choice, error.options or ())
    cause = error.__cause__ or error
    full_key = str(getattr(cause, "full_key", "") or "").split("[")[0]
    argument = next(
        (str(o.input_line).lstrip("+") for o in reversed(overrides) if o.key_or_group == full_key),
        full_key,
    )
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and full_key in options:
        return f"{argument}: is an option of {options[full_key].choice}; give that too"
    if isinstance(cause, ValidationError):
        return _wrong_type(argument, cause)
    return _first_line(cause)


def _problem(verb: str, override: Override) -> str:
    """Return the mistake that one argument shows by itself, or ""."""
    argument = str(override.input_line)
    key = override.key_or_group
    value = argument.partition("=")[2]
    if not key:
        return _unreadable(argument)
    if override.is_sweep_override():
        return _several_values(verb, key, value)
    if key == "experiment" or key in GROUPS_OF[verb]:
        choices: Iterable[str] = experiments() if key == "experiment" else GROUPS[key]
        choice = value.strip("'\"")
        return "" if choice in choices else _no_such_choice(key, choice, choices)
    options = schema_options(verb)
    if key in options or re.match(r"hydra[./]|variants[.]", key):
        return ""
    suggestions = [f"{name}={value}" for name in _nearest(key, list(options))]
    hint = _did_you_mean(suggestions, f" {_listed_by(verb)}")
    return f"{argument}: there is no such option{hint}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def _listed_by(verb: str) -> str:
    command = verb.replace("_", " experiment=")
    return f"(`knobwise {command} --help` lists every option)"


def _nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Return keys that a mistyped one may stand for: spelt almost alike, else with the same last
    part (`optimiser.lr` for `lr`), else spelt somewhat alike."""
    section, dot, _ = key.partition(".")
    last = key.split(".")[-1]
    same_end = [name for name in keys if "." in name and name.split(".")[-1] == last]
    # a key of a section is compared with that section alone: `loss.baseline` is not `baselines`
    if dot:
        keys = [name for name in keys if name.startswith(f"{section}.")] or keys
    alike = get_close_matches(key, keys, n=1, cutoff=0.8)
    return alike or same_end[:3] or get_close_matches(key, keys, n=1)


def _did_you_mean(suggestions: Iterable[str], end: str) -> str:
    """Return `; did you mean a or b?`, or `end` where there is nothing to suggest."""
    text = " or ".join(suggestions)
    return f"; did you mean {text}?" if text else end


def _unreadable(argument: str) -> str:
    """Return what is wrong with an argument that Hydra's grammar cannot read."""
    tables = (".csv", ".parquet", ".jsonl", ".ndjson", ".gz", ".safetensors")
    if "=" not in argument and Path(argument).suffix in tables:
        hint = f"did you mean profile=table profile.path={argument}?"
        return f"{argument}: options are key=value; {hint}"
    if not re.match(r"[+~]*[\w./@-]+=", argument):
        return f"{argument!r}: is not of the form key=value, such as policy.hidden=48"
    return (
        f"{argument!r}: this value cannot be read; quote a value with blanks or "
        "brackets twice: 'key=\"a (1)\"'"
    )


def _several_values(verb: str, key: str, values: str) -> str:
    """Return what is wrong with `key=a,b` outside a sweep."""
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
    """Return what is wrong with `group=choice`; where it is a file, suggest the reader of files."""
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


def _wrong_type(argument: str, cause: ValidationError) -> str:
    """Return what is wrong with `key=value`, by the node of OmegaConf that it was meant for."""
    key, _, value = argument.partition("=")
    node = cause.child_node
    if cause.value is None:
        return f"{key}=null: must have a value"
    if isinstance(node, DictConfig):
        return f"{argument}: {key} is a section; its options are {key}.…"
    # a list that is null has no node
    if isinstance(node, ListConfig) or "ListConfig" in _first_line(cause):
        return f"{argument}: must be a list, {key}=[{value or '…'}]"
    kinds = {BooleanNode: "true or false", IntegerNode: "a whole number", FloatNode: "a number"}
    kind = next((name for kind, name in kinds.items() if isinstance(node, kind)), None)
    if kind:
        return f"{argument}: must be {kind}"
    return f"{argument}: {_first_line(cause)}"
