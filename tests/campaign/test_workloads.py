"""The campaign's commands have the options of today, and one that never begins is no success."""

import importlib
import pkgutil
from random import Random
from unittest.mock import Mock

import pytest
from commands import write_table

import campaign
from campaign import limits
from campaign.__main__ import main as run_campaign
from campaign.kills import Reference, kill_trial, reference_of
from campaign.limits import INSPECT, limit_trial
from campaign.state import state_of
from campaign.workloads import LIVE, WORKLOADS, Workload
from knobwise.__main__ import main
from knobwise.experiments.command_line.main import VERBS

COMMANDS = {
    **{workload.name: workload.work for workload in WORKLOADS if isinstance(workload.work, list)},
    "train selector, live": LIVE,
    "limits": INSPECT,
}
UNKNOWN = ["inspect", "no_such_option=1"]


def test_every_module_of_the_campaign_can_be_imported():
    for module in pkgutil.walk_packages(campaign.__path__, "campaign."):
        importlib.import_module(module.name)


def test_every_workload_is_a_command_or_a_known_function():
    others = {workload.name for workload in WORKLOADS} - COMMANDS.keys()
    assert others == {"request log"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_workload_comes_to_its_work(name, home, monkeypatch):
    """Its options are known, and the function that works is called."""
    # by Hydra's own launcher jobs stay in this process
    words = [word for word in COMMANDS[name] if not word.startswith("hydra")]
    module, _, function = VERBS[words[0]].partition(":")
    work = Mock(return_value=0)
    monkeypatch.setattr(f"knobwise.experiments.{module}.{function}", work)
    assert main(words) == 0
    assert work.call_count == (2 if "-m" in words else 1)


@pytest.mark.parametrize("torn", [False, True])
def test_a_command_that_never_begins_has_no_reference_and_no_good_end(torn, tmp_path):
    broken = Workload("broken", write_table, UNKNOWN, "*.parquet")
    with pytest.raises(RuntimeError, match="no_such_option"):
        reference_of(broken, tmp_path / "reference")
    prepared = tmp_path / "reference" / "prepared"
    wanted = state_of(prepared) | {"inspection.json": {"": "1"}}
    reference = Reference(prepared, wanted, set(), 1.0, 5)
    outcome, _ = kill_trial(broken, reference, tmp_path / "killed", Random(0), torn)
    assert outcome in ("unlike", "vague")


def test_a_limit_is_not_met_by_a_command_that_fails_without_it(tmp_path, monkeypatch):
    limits._without_limits.cache_clear()
    monkeypatch.setattr(limits, "INSPECT", UNKNOWN)
    with pytest.raises(RuntimeError, match="no_such_option"):
        limit_trial("profile=0", tmp_path / "limited")
    limits._without_limits.cache_clear()


def test_a_campaign_of_no_kind_is_refused(tmp_path, capsys):
    assert run_campaign([f"folder={tmp_path}", "only=no such kind"]) == 2
    assert "no such kind" in capsys.readouterr().err
