"""Flags and names of the original scripts, in our words.

Options here are `key=value`; whoever writes a flag is told the words that do the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from knobwise.common.errors import InputError
from knobwise.experiments.command_line.registry import config_groups, options_in
from knobwise.experiments.command_line.verbs import settings_of_verb

SWEEP = ("-m", "--multirun")
"""The flags that Hydra gets; its others read settings from elsewhere, or a pickle."""
DASHES = "-–—"
"""What a flag begins with; word processors make one long dash of two."""

MEANINGS = {
    "optimiser.iterations": (
        "an iteration is one batch of optimiser.contexts contexts; an epoch over n training "
        "samples, each at three budgets, has 3 n / optimiser.contexts, such as 47 of 64 contexts "
        "for 1,000 samples"
    ),
    "profile.features": "FILE holds the features of every sample, see docs/profiles.md",
    "beams.embeddings": "beams in JSON need a FILE of embeddings, see docs/demonstrations.md",
}
"""Option → what must be known of it."""
NO = ("false", "no", "0")
CONTROLLERS = {
    "exp5_dir": "profile=exp5_exp6 profile.exp5_dir={}",
    "exp6_dir": "profile=exp5_exp6 profile.exp6_dir={}",
    "dataset_name": "profile=exp5_exp6 profile.dataset_name={}",
    "model_path": "profile.features=FILE",
    "output_data_path": "",
    "force_recompute": "",
    "output_dir": "runs={}",
    "batch_size": "optimiser.contexts={} optimiser.minibatch={}",
    "num_epochs": "optimiser.iterations={}",
    "epochs": "optimiser.iterations={}",
    "lr": "optimiser.lr={}",
    "learning_rate": "optimiser.lr={}",
    "group_size": "loss.group_size={}",
    "train_split": "split.train={} split.validation={half}",
    "reward_alpha": "reward=shaped reward.alpha={}",
    "reward_beta": "reward=shaped reward.beta={}",
    "reward_gamma": "reward=shaped reward.gamma={}",
    "reward_delta": "reward=shaped reward.delta={}",
    "reward_epsilon": "reward=shaped reward.epsilon={}",
    "seed": "seeds=[{}]",
    "sft_ckpt": "init_from={}",
}
"""Flag → the words that do the same in the training of a controller; "" for one that is not needed:
nothing is stored in between. `{half}` is half of what a share leaves, as the original has no test
part."""
SELECTORS = {
    "sft_ckpt": "init_from={}",
    "beam_data": "beams=files beams.path={} beams.embeddings=FILE",
    "rce_epochs": "rce.epochs={}",
    "grpo_epochs": "grpo.epochs={}",
    "num_epochs": "grpo.epochs={}",
    "epochs": "grpo.epochs={}",
    "output_dir": "runs={}",
    "batch_size": "grpo.queries={}",
    "lr": "grpo.lr={}",
    "kl_beta": "loss.kl_to_ref_coeff={}",
    "reward_mode": "reward.mode={}",
    "hard_weight": "reward.hard_weight={}",
    "soft_weight": "reward.soft_weight={}",
    "reward_alpha": "reward.alpha={}",
    "reward_beta": "reward.beta={}",
    "use_rank_advantage": "loss.advantage=rank",
    "min_positive_ratio": "loss.min_positive={}",
    "seed": "seeds=[{}]",
}
"""Flag, or variable of the environment, → the words that do the same in that of a selector."""
OF_SELECTORS = {*SELECTORS} - {*CONTROLLERS} | {"sft_ckpt"}
"""Flags that tell that a selector is meant, if no experiment is named."""
COMMON = ("output_dir", "batch_size", "lr", "learning_rate", "num_epochs", "epochs", "seed")
"""Flags of many programs, which do not tell that the original's settings are meant."""


def in_our_words(schema: str, name: str, value: str) -> str:
    """Return the words that do what a name of the original does; "" if there are none.

    Args:
        schema: the key of the verb, `train` or `train_selector`.
        name: without dashes before it.
        value: of the name; "" for a placeholder.
    """
    known = {"train": CONTROLLERS, "train_selector": SELECTORS}.get(schema, {})
    words = known.get(name.lower().replace("-", "_"), "")
    if "loss.advantage" in words and value.lower() in NO:
        words = "loss.advantage=zscore"
    words = words.replace("{half}", _half_of_rest(value))
    return " ".join(shlex.quote(word.replace("{}", value or "…")) for word in words.split())


def _half_of_rest(share: str) -> str:
    try:
        return f"{(1 - float(share)) / 2:.4g}"
    except ValueError:
        return "…"


def meaning_of(words: str) -> str:
    """Return what must be known of words that do not mean quite the same, as ` (…)`, or ""."""
    meanings = [meaning for option, meaning in MEANINGS.items() if option in words]
    return f" ({'; '.join(meanings)})" if meanings else ""


def refuse_flags(schema: str, arguments: Sequence[str]) -> None:
    """Refuse words with dashes, and say what to write instead of them.

    Args:
        schema: the key of the verb.
        arguments: the words of the command behind the verb.

    Raises:
        InputError: there is a word with dashes that is no flag of ours.
    """
    flagged = _flagged(arguments)
    if not flagged:
        if not set(SWEEP).isdisjoint(arguments):
            _refuse_sweep(schema)
        return
    settings = settings_of_verb(schema)()
    options = [option.key for option in options_in(settings, config_groups(schema))]
    names = {name.replace("-", "_") for name, _ in flagged}
    if schema == "train" and names & OF_SELECTORS:
        schema = "train_selector"
    ours = []
    unknown = []
    unneeded = []
    for name, value in flagged:
        plain = name.replace("-", "_")
        words = in_our_words(schema, name, value)
        if words:
            ours.append(words)
        elif plain in options:
            ours.append(shlex.quote(f"{plain}={value or 'true'}"))
        elif schema == "train" and plain in CONTROLLERS:
            unneeded.append(name)
        else:
            unknown.append(name)
    advice = []
    if ours:
        words = " ".join(dict.fromkeys(" ".join(ours).split(" ")))
        experiment = ""
        if "experiment=" not in " ".join([*arguments, words]):
            if schema == "train_selector":
                experiment = "experiment=selector_seeds "
            elif schema == "train" and names & CONTROLLERS.keys() - {*COMMON}:
                experiment = "experiment=seeds "
        advice.append(f"write {experiment}{words}{meaning_of(words)}")
    if unneeded:
        advice.append(f"leave out {', '.join(unneeded)}: not needed")
    if unknown:
        verb = schema.partition("_")[0]
        advice.append(f"knobwise {verb} --help lists all of them (none is {', '.join(unknown)})")
    first = next(word for word in arguments if word not in SWEEP and word[0] in DASHES)
    raise InputError(f"{first}: options are key=value, without dashes; {'; '.join(advice)}")


def _refuse_sweep(schema: str) -> None:
    """Refuse a sweep where there can be none.

    Raises:
        InputError: for another verb than train; in a job of a W&B agent, which names one W&B run
            for the results, so that those of each run would replace those before.
    """
    if not schema.startswith("train"):
        raise InputError("-m: sweeps are for knobwise train")
    # imported here, since other commands need none of it
    from knobwise.experiments.tracking.wandb_run import is_job_of_agent

    if is_job_of_agent():
        raise InputError(
            "-m: a job of a W&B agent has one W&B run, in which each run's results would replace "
            "those before; leave out -m and put the values into the W&B sweep, or unset "
            "WANDB_SWEEP_ID to log each run by itself"
        )


def _flagged(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name of each word with dashes, without these, and its value: what follows `=`, or
    the next words without `=`; "" for none, and several in brackets."""
    flagged = []
    values: list[str] | None = None
    for word in arguments:
        if word in SWEEP:
            values = None
        elif word.startswith(tuple(DASHES)):
            name, _, value = word.lstrip(DASHES).partition("=")
            values = list(filter(None, [value]))
            flagged.append((name, values))
        elif "=" in word:
            values = None
        elif values is not None:
            values.append(word)
    return [(name, _joined(values)) for name, values in flagged]


def _joined(values: Sequence[str]) -> str:
    if len(values) > 1:
        return f"[{','.join(values)}]"
    return "".join(values)
