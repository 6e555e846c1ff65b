"""What a run was trained on, from the `config.yaml` in its folder, for commands that take it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from knobwise.common.errors import InputError
from knobwise.experiments.settings.config_file import config_of, of_run
from knobwise.experiments.settings.words import plain_values, shell_word

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def group_of_run(
    checkpoint: str, group: str, choices: Mapping[str, type[DataclassInstance]]
) -> DictConfig | None:
    """Return what a run was trained on, from its `config.yaml`: its profile, beams or encoder, as a
    config of its dataclass; None where that names none.

    Args:
        checkpoint: the folder of the run, or a file in it.
        group: the section of the file, which names its reader as `format`.
        choices: the dataclass of each reader.

    Raises:
        InputError: this version cannot read it.
    """
    section = of_run(checkpoint, group)
    if section is None:
        return None
    try:
        schema = OmegaConf.structured(choices[section["format"]])
        config = OmegaConf.merge(schema, plain_values(section))
        assert isinstance(config, DictConfig)
        # the dataclass may refuse values
        OmegaConf.to_object(config)
        return config
    except Exception as error:  # whatever another version or a damaged file makes of it
        reader = of_run(checkpoint, f"{group}.format")
        raise InputError(
            f"{config_of(checkpoint)}: {group}={reader} cannot be read; give {group}=…"
        ) from error


def refuse_code(config: DictConfig, group: str, chosen: Set[str]) -> None:
    """Refuse a config of a run that names code, unless the command names it too: a run from
    elsewhere must not choose what is executed.

    Args:
        config: see `group_of_run`.
        chosen: the keys that the command sets.
    """
    for name in ("model", "features_from"):
        code = config.get(name) or ""
        key = f"{group}.{name}"
        if ":" in code and key not in chosen:
            raise InputError(
                f"{key}: the run names {code}, whose code would be executed; if you trust it, give "
                f"{shell_word(key, code)}"
            )
