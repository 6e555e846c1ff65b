"""Words that a choice beside them does not read: refused where they are typed, and left out of the
jobs of a sweep that do not read them."""

import pytest
import yaml
from commands import jobs_of, refused, words_of
from helpers import input_error

from knobwise.experiments.command_line.compose import read_settings
from knobwise.experiments.command_line.registry import schema_of
from knobwise.experiments.settings.choices import CONF, experiments
from knobwise.experiments.settings.config_file import flatten_keys
from knobwise.experiments.settings.unread import unread_options
from knobwise.experiments.settings.values import training_settings

ONE_STEP = "optimiser.epochs=1 optimiser.minibatch=256"
IGNORED = {
    "reward.beta=0.5": ["reward=utility"],
    "reward.miss=0.3": ["reward=shaped", "reward=function reward.function=examples.rewards:speed"],
    "reward.alpha=2": ["budget=mean", "reward=function reward.function=examples.rewards:speed"],
    "reward=shaped": ["budget=mean"],
    "budget.strategy=uniform": ["budget=mean"],
    "budget.values_ms=[3]": ["budget=quantiles", "budget=mean"],
    "budget.limit_probability=0.8": [""],
    "policy.sharpness=20": ["policy=independent", "optimiser.pretrain_iterations=0 budget=mean"],
    "policy.teacher_hidden=8": ["policy=independent", "optimiser.pretrain_iterations=0"],
    "policy.teacher_dropout=0.1": ["policy=independent", "optimiser.pretrain_iterations=0"],
    "optimiser.teacher_iterations=4": [
        "policy=independent",
        "policy=independent policy.guard=true",
    ],
    "policy.guard=true": ["policy.promise=0.9"],
    "policy.utility_head=true": ["budget=mean"],
    "policy.budget_width=3": ["policy.budget_encoding=linear"],
    "policy.dropout=0.1": [
        "policy=independent optimiser.pretrain_iterations=0 loss.dropout=false",
        "optimiser.pretrain_iterations=0 loss.dropout=false",
    ],
    "optimiser.pretrain_lr=1": ["optimiser.pretrain_iterations=0"],
    "optimiser.lr=1": ["optimiser.iterations=0"],
    "optimiser.lr_warmup=0.1": ["optimiser.schedule=constant"],
    "loss.group_size=4": ["loss=exact"],
    "loss.advantage_std_floor=0.1": ["", "loss.advantage=rank", "loss=ppo"],
    "loss.advantage_std_eps=0.1": ["loss.advantage=centred"],
    "loss.advantage_clip=3": ["loss=ppo"],
    "loss.clip_epsilon=0.1": [ONE_STEP, f"loss=exact {ONE_STEP}", "optimiser.iterations=0"],
    "loss.entropy_coeff=0.1": ["optimiser.iterations=0"],
}
"""A word → choices beside which nothing reads it."""
READ = {
    "reward.beta=0.5": ["reward=shaped"],
    "reward.miss=0.3": ["", "reward=utility policy=independent"],
    "budget.values_ms=[3]": ["budget=fixed"],
    "budget.limit_probability=0.8": ["budget.limits={usd:0.1}"],
    "policy.sharpness=20": ["", "policy=independent policy.utility_head=true"],
    "policy.teacher_hidden=8": ["", "policy=utility"],
    "policy.promise=0.9": ["", "policy=independent"],
    "policy.budget_width=3": [""],
    "optimiser.lr_warmup=0.1": ["optimiser.schedule=cosine"],
    "loss.group_size=4": ["loss=sampled", "loss=ppo"],
    "loss.advantage_std_floor=0.1": ["loss.advantage=zscore", "loss=ppo loss.advantage=zscore"],
    # in the second minibatch of a batch the policy has moved
    "loss.clip_epsilon=0.1": [
        "",
        "policy=independent",
        f"{ONE_STEP} optimiser.epochs=2",
        "policy=grpo",
        f"{ONE_STEP} loss.dropout=true",
    ],
    "policy.dropout=0.1": ["policy=grpo", "policy=independent"],
    "policy.augment=0.1": ["policy=grpo", "policy=independent", ""],
}
"""A word → choices beside which it is read."""


def cases(table):
    return [(word, beside) for word, choices in table.items() for beside in choices]


@pytest.mark.parametrize(("word", "beside"), cases(IGNORED))
def test_a_word_that_nothing_reads_is_refused(word, beside, home, capsys):
    line = refused(words_of("train", beside, word), capsys)
    assert line.startswith(f"knobwise: {word.partition('=')[0]}=")


@pytest.mark.parametrize(("word", "beside"), cases(READ))
def test_a_word_that_is_read_is_taken(word, beside):
    settings = read_settings("train", words_of(beside, word))
    assert word.partition("=")[0] not in unread_options(settings)


def test_python_and_evaluate_refuse_them_too(home, capsys):
    with input_error("loss.group_size"):
        training_settings({"loss": "exact", "loss.group_size": 8})
    with input_error("reward.beta"):
        training_settings({"reward": {"beta": 1}})
    refused(words_of("evaluate reward.gamma=1"), capsys)
    refused(
        words_of("train experiment=selector selector.version=v0 selector.update=convex"), capsys
    )


def test_to_ask_for_nothing_is_no_mistake():
    assert read_settings("train", words_of("policy=independent optimiser.teacher_iterations=0"))
    assert read_settings("train", words_of("reward.beta=0 loss=exact loss.advantage_clip=null"))


def test_what_nobody_typed_may_be_there():
    # the file of the experiment sets a floor
    assert read_settings("train", words_of("experiment=seeds loss.advantage=centred"))
    assert read_settings("train", ["reward.kind=shaped"]).reward.miss == 0.2


def test_in_a_sweep_a_word_is_left_out_of_the_jobs_that_do_not_read_it(home, capsys):
    exact, sampled = jobs_of(words_of("loss=exact,sampled loss.group_size=5"))
    assert (exact.loss.group_size, sampled.loss.group_size) == (16, 5)
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "group_size" in line]
    assert note.startswith("loss.group_size=5: loss=exact ")
    # of the sweep in the file of an experiment too
    taught, free = jobs_of(words_of("experiment=heads policy.teacher_hidden=8"))
    assert (taught.policy.teacher_hidden, free.policy.teacher_hidden) == (8, 96)
    words = "experiment=selector selector.version=v0,v2 selector.update=convex"
    assert [job.selector.update for job in jobs_of(words_of(words))] == ["additive", "convex"]


@pytest.mark.parametrize(
    "words",
    [
        "loss=exact loss.group_size=4,8",
        "reward=shaped,utility loss=exact loss.group_size=4",
        "reward=shaped,function reward.miss=0.3",
    ],
)
def test_a_word_that_no_job_of_a_sweep_reads_is_refused(words, home, capsys):
    refused(words_of("train -m", words), capsys)


@pytest.mark.campaign
@pytest.mark.parametrize("name", experiments())
def test_no_experiment_sets_what_none_of_its_jobs_reads(name, home):
    words = words_of(f"experiment={name}", "beams.path=b.json" * (name == "selector_replay"))
    content = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text())
    swept = content.pop("hydra", {}).get("sweeper", {}).get("params", {})
    jobs = jobs_of(words) if swept else [read_settings(schema_of("train", words), words)]
    ignored = set.intersection(*(set(unread_options(job)) for job in jobs))
    assert not ignored & {*flatten_keys(content), *swept}
