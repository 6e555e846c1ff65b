"""The settings that `key=value` arguments stand for, which Hydra composes from `experiments/conf`
and from the dataclasses of every verb."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from knobwise.common.errors import InputError
from knobwise.common.interruption import end_with
from knobwise.common.progress import say
from knobwise.experiments.command_line.flags import SWEEP
from knobwise.experiments.command_line.grammar import kinds_of_options, literal
from knobwise.experiments.command_line.mistakes import explain_mistakes
from knobwise.experiments.command_line.registry import (
    READERS,
    config_groups,
    readers_of,
    register_settings,
)
from knobwise.experiments.command_line.verbs import settings_of_verb
from knobwise.experiments.settings.choices import BY_USER, CONF, choice_of
from knobwise.experiments.settings.config_file import of_run
from knobwise.experiments.settings.settings_of_run import group_of_run, refuse_code
from knobwise.experiments.settings.tracking import Training
from knobwise.experiments.settings.unread import refuse_unread, unread_options

OF_RUN = "of_run"
"""The choice of a group that is what the run of a checkpoint was trained on."""
OF_HYDRA = re.compile(
    r"hydra/(launcher|sweeper)=\w+"
    r"|\+*hydra\.(launcher(\.ray\.(init|remote))?|sweep)\.[a-z]\w*=[^${[]*"
)
"""What the command line takes of Hydra. Anything else could name code to import: a callback, a
handler of logs, a `_target_`, a folder of settings."""


def read_settings(verb: str, arguments: Sequence[str]) -> Any:
    """Return the settings of a verb, as an instance of its dataclass.

    Raises:
        InputError: an unknown key or group, a value of the wrong type or a missing one, or one that
            the choices beside it do not read.
    """
    words = in_grammar(verb, arguments)
    config = compose_config(verb, [*words_of_run(verb, words), *words])
    refuse_unread(config, map(key_of, words))
    return settings_of(config)


def key_of(word: str) -> str:
    """Return the key of a `key=value` word."""
    return word.lstrip("+~").partition("=")[0]


def in_grammar(verb: str, arguments: Sequence[str], sweep: bool = False) -> list[str]:
    """Return words in which options that are text hold what was typed; see `literal`."""
    return literal(arguments, text_options(verb), sweep)


@cache
def text_options(verb: str) -> dict[str, set[str]]:
    """Return what the options of a verb may hold; see `kinds_of_options`."""
    readers = {group: readers_of(group) for group in READERS if group in config_groups(verb)}
    return kinds_of_options(settings_of_verb(verb)(), readers)


def words_of_run(verb: str, arguments: Sequence[str]) -> list[str]:
    """Return the words by which profile, beams and encoder that are not chosen are those of the
    checkpoint's run, so that options change these. The run also says whether there are
    baselines."""
    defaults = config_groups(verb).items()
    groups = [group for group, default in defaults if default in readers_of(group)]
    if not groups or not hasattr(settings_of_verb(verb), "checkpoint"):
        return []
    # Hydra knows what quotes and interpolations stand for
    named = [word for word in arguments if word.startswith("checkpoint=")]
    checkpoint = compose_config(verb, named).checkpoint
    chosen = {word.partition("=")[0] for word in arguments}
    try:
        has_baselines = of_run(checkpoint, "baselines") is not False
    except InputError as error:
        # who names the data needs no such file
        if chosen.isdisjoint(READERS):
            raise InputError(f"{error}; restore a copy, or give profile=… or beams=…") from error
        return []
    words = []
    for group in groups:
        if group in chosen:
            continue
        section = "profile" if group == "trained_on" else group
        trained_on = group_of_run(checkpoint, section, readers_of(group))
        if trained_on is not None:
            refuse_code(trained_on, group, chosen)
            ConfigStore.instance().store(group=group, name=OF_RUN, node=trained_on)
            words.append(f"{group}={OF_RUN}")
    if verb == "evaluate" and not has_baselines:
        words.append("baselines=false")
    return words


def compose_config(verb: str, arguments: Sequence[str]) -> DictConfig:
    """Return the config that Hydra composes for a verb, unchecked.

    Raises:
        InputError: an unknown key or group, a value of the wrong type.
    """
    register_settings(verb)
    # a value of another kind, such as profile=[1], makes Hydra fail by itself
    mistakes = explain_mistakes(verb, arguments, TypeError, ValueError)
    with mistakes, initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(verb, with_variants(arguments))


def settings_of(config: DictConfig) -> Any:
    """Return a composed config as an instance of its dataclass.

    Raises:
        InputError: a value that is missing, or that the dataclass refuses.
    """
    try:
        return OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise InputError(f"{error.full_key}: must be given, as {error.full_key}=…") from error
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
    _register_own(arguments)
    chosen = re.compile(r"(?:variants|reward\.by_shots)[.=]")
    words = [re.sub(r"^\++(?!hydra\b)", "", argument) for argument in arguments]
    return [f"++{word}" if chosen.match(word) else word for word in words]


def _register_own(arguments: Sequence[str]) -> None:
    """Tell Hydra of choices that are code of the user's own, such as `loss=module:Class`."""
    for word in arguments:
        group, _, choices = word.lstrip("+").partition("=")
        for name in choices.split(",") if group in BY_USER else ():
            if ":" in name:
                ConfigStore.instance().store(group=group, name=name, node=choice_of(group, name))


def run_hydra(
    verb: str, arguments: Sequence[str], task: Callable[[Training, list[str], list[str]], object]
) -> None:
    """Have Hydra run the jobs of a sweep (`-m`), by the launcher that the arguments name.

    Args:
        task: called for each job, in the process that the launcher chose, with its settings, the
            words of its command, and those of them that vary from job to job (if none, all).

    Raises:
        InputError: arguments that Hydra refuses, or a word that no job reads, before the first job
            starts; or, once all jobs are done, the mistake in one of them. Other errors of a job
            are raised then as well.
    """
    from joblib.parallel import LokyBackend, register_parallel_backend

    # the workers of joblib's launcher end with this process; Ray sees to its own
    workers = partial(LokyBackend, initializer=end_with, initargs=(os.getpid(),))
    register_parallel_backend("loky", workers)

    def job(config: DictConfig) -> None:
        os.chdir(get_original_cwd())  # relative paths refer to it, but workers start elsewhere
        # Hydra writes a backslash before the colon of module:Class, which the command line refuses
        words = [word.replace(r"\:", ":") for word in HydraConfig.get().overrides.task]
        # what another job reads is left out where this one does not
        for key, reason in unread_options(config).items():
            if key in typed and "." in key:
                say(f"{key}={OmegaConf.select(config, key)}: {reason} does not read it; left out")
                OmegaConf.update(config, key, OmegaConf.select(usual, key))
        # Hydra writes false as False
        varied = [word for word in words if word.lower() not in common]
        task(settings_of(config), words, varied or words)

    register_settings(verb)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    # `hydra.main` reads the words of this process, and takes the flag before the others only
    options = [word for word in arguments if word not in SWEEP]
    sys.argv = ["knobwise", "-m", *with_variants(in_grammar(verb, options, sweep=True))]
    common = {word.lower() for word in sys.argv}
    typed = set(map(key_of, sys.argv))
    usual = OmegaConf.structured(settings_of_verb(verb))
    with explain_mistakes(verb, arguments):
        _refuse_what_no_job_reads(verb, sys.argv[2:])
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=verb)(job)()


def _refuse_what_no_job_reads(verb: str, words: Sequence[str]) -> None:
    """Refuse the first word of a sweep that none of its jobs reads; one that some of them read may
    stay.

    Raises:
        InputError: there is one, or Hydra refuses the words.
    """
    first, *others = (compose_config(verb, job) for job in _jobs(verb, words))
    ignored = set(unread_options(first)).intersection(*map(unread_options, others))
    refuse_unread(first, [key for key in map(key_of, words) if key in ignored])


def _jobs(verb: str, words: Sequence[str]) -> list[list[str]]:
    """Return the words of every job of a sweep, with what the file of its experiment sweeps."""

    def split(words: Sequence[str]) -> list[list[str]]:
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides([*words]), None)
        return [list(job) for job in jobs]

    parser = OverridesParser.create()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(verb, split(words)[0], return_hydra_config=True)
    swept = config.hydra.sweeper.get("params") or {}
    # of two words with the same key the later one counts
    return split([*(f"{key}={values}" for key, values in swept.items()), *words])
