"""The settings of a training from Python values, the same as `knobwise train` has from words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knobwise.common.checks import one_of
from knobwise.common.errors import InputError
from knobwise.experiments.settings.choices import CHOICES, CONF, choice_of, experiments
from knobwise.experiments.settings.config_file import flatten_keys
from knobwise.experiments.settings.options import TrainRun
from knobwise.experiments.settings.unread import refuse_unread
from knobwise.experiments.settings.words import nearest_options, plain_values

Values = Mapping[str, Any]


def training_settings(options: Values) -> TrainRun:
    """Return the settings of a training of a controller whose data are given beside them.

    Args:
        options: values by the names that `knobwise train` has for them. Those of a section are a
            mapping, as in `optimiser={"lr": 1e-4}`, or have dotted names; text in place of a
            section is a choice, as in `policy="utility"`.

    Raises:
        InputError: an unknown option or choice, a value of the wrong type or one that the
            settings refuse, one that the choices beside it do not read, an experiment of selectors,
            or a profile.
    """
    overrides = dict(options)
    name = overrides.pop("experiment", TrainRun.experiment)
    chosen, values = _of_experiment(name)
    typed = [*flatten_keys(overrides)]
    for group in CHOICES:
        if isinstance(overrides.get(group), str):
            chosen[group] = overrides.pop(group)
    # the optimiser that suits the policy
    if "policy" in chosen:
        chosen.setdefault("optimiser", chosen["policy"])
    config = OmegaConf.structured(TrainRun(experiment=name, profile=None))
    for group, choice in chosen.items():
        OmegaConf.update(config, group, choice_of(group, choice))
    known = flatten_keys(asdict(TrainRun(profile=None)))
    for key, value in {**flatten_keys(values), **flatten_keys(overrides)}.items():
        if key.partition(".")[0] == "profile":
            raise InputError(f"{key}: the data are given; options of a profile are for read")
        if isinstance(value, Mapping):  # an empty one
            continue
        # the value of an option may be a mapping itself, as in budget.limits
        in_mapping = known.get(key.rpartition(".")[0], key) is None
        if key not in known and not in_mapping:
            raise InputError(f"{key}={value!r}: {_mistake(key, value, known)}")
        try:
            OmegaConf.update(config, key, plain_values(_in_python(value)), force_add=in_mapping)
        except OmegaConfBaseException as error:
            raise InputError(f"{key}={value!r}: {str(error).splitlines()[0]}") from error
    refuse_unread(config, typed)
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, TrainRun)
    return settings


def _of_experiment(name: str) -> tuple[dict[str, str], Values]:
    """Return the choices and the values in the file of an experiment, without its data.

    Raises:
        InputError: no such experiment, or one of selectors.
    """
    one_of("experiment", name, experiments())
    content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{name}.yaml"))
    # Hydra's own settings say what a sweep runs
    for key in ("hydra", "profile", "experiment"):
        content.pop(key, None)
    chosen: dict[str, str] = {}
    values: dict[str, object] = {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, str):
            # an experiment that this one is built on
            more, below = _of_experiment(entry)
            chosen |= more
            values |= flatten_keys(below)
            continue
        ((word, choice),) = entry.items()
        chosen[word.removeprefix("override /")] = choice
    if name.startswith("selector"):
        raise InputError(f"experiment={name}: trains a selector; give one of a controller")
    chosen.pop("profile", None)
    return chosen, values | flatten_keys(content)


def _mistake(key: str, value: object, known: Collection[str]) -> str:
    """Say what is wrong with a key that is not among the known options."""
    if any(option.startswith(f"{key}.") for option in known):
        choices = ", ".join(CHOICES.get(key, ()))
        return "must be a mapping of its options" + f", or one of {choices}" * bool(choices)
    hint = " or ".join(f"{option}={value}" for option in nearest_options(key, known))
    return "there is no such option" + f"; did you mean {hint}?" * bool(hint)


def _in_python(value: object) -> object:
    """Return a value without arrays, tensors, tuples and paths."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return list(map(_in_python, value))
    return str(value) if isinstance(value, Path) else value
