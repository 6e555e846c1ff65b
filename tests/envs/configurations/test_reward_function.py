"""A reward that the user wrote: what it gets, where it counts, and every way in which it is
refused."""

import itertools
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import repeated, small_table, table_of

from knobwise.common.errors import InputError
from knobwise.envs.configurations.reward import RewardTable
from knobwise.envs.configurations.settings import BudgetConfig, RewardConfig
from knobwise.envs.configurations.torchrl_env import ConfigBandit
from knobwise.envs.tables.profile_table import Knob

NAN = math.nan
TABLE = table_of([[0.6, 1.0], [0.5, NAN]], [[[1, 3], [4, 2]], [[5, 7], [NAN, NAN]]])
NUMBERS = itertools.count()
Written = Callable[[str], RewardConfig]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Writes the body of a reward function into a new module of this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(body: str, before: str = "") -> RewardConfig:
        module = f"mine_{next(NUMBERS)}"
        head = (
            "import random, torch\nfrom pathlib import "
            f"Path\n{before}\ndef f(accuracy, latency_ms, "
        )
        Path(f"{module}.py").write_text(
            head + "budget_ms, knobs):\n" + textwrap.indent(body, "    ")
        )
        return RewardConfig(kind="function", function=f"{module}:f")

    return write


def test_rewards_by_hand_of_each_measurement_and_their_mean(written: Written) -> None:
    rewards = RewardTable(
        TABLE, written("return accuracy - latency_ms / budget_ms + 10 * knobs['size']")
    )
    rows, budgets = torch.tensor([0, 1]), torch.tensor([10.0, 20.0])
    wanted = torch.tensor([[0.6 - 0.2, 1.0 - 0.3 + 10], [0.5 - 0.3, NAN]])
    torch.testing.assert_close(rewards.all(rows, budgets), wanted, equal_nan=True)
    chosen, repeats = torch.tensor([[1, 0], [0, 0]]), torch.tensor([[0, 1], [1, 0]])
    each = torch.tensor([[1.0 - 0.4 + 10, 0.6 - 0.3], [0.5 - 0.35, 0.5 - 0.25]])
    torch.testing.assert_close(rewards.chosen(rows, chosen, budgets, repeats), each)
    means = torch.tensor([[10.7, 0.4], [0.2, 0.2]])
    torch.testing.assert_close(rewards.chosen(rows, chosen, budgets), means)


@pytest.mark.parametrize("holes", [0.0, 0.4])
def test_a_formula_written_as_a_function_gives_the_same_rewards(
    holes: float, written: Written
) -> None:
    table = repeated(small_table(20, holes=holes))
    config = written("return torch.where(latency_ms <= budget_ms, accuracy, -0.2)")
    budget, formula = (
        BudgetConfig("fixed", values_ms=(9.0, 14.0)),
        RewardConfig(kind="utility", miss=0.2),
    )
    options = {
        "batch_size": 50,
        "group_size": 3,
        "budget": budget,
        "full_information": True,
        "seed": 0,
    }
    ours, known = (ConfigBandit(table, reward=reward, **options) for reward in (config, formula))
    torch.manual_seed(0)
    first = ours.rollout(1).squeeze(-1)
    torch.manual_seed(0)
    second = known.rollout(1).squeeze(-1)
    assert torch.equal(first["next", "reward"], second["next", "reward"])
    torch.testing.assert_close(
        first["reward_per_configuration"], second["reward_per_configuration"], equal_nan=True
    )


def test_a_knob_with_names_comes_as_indices_and_others_as_their_values(written: Written) -> None:
    knobs = (Knob("tier", ("low", "high")), Knob("crops", (0.5, 4)))
    table = replace(TABLE, knobs=knobs, configurations=torch.tensor([[0, 1], [1, 0]]))
    rewards = RewardTable(
        table, written("return 10.0 * knobs['tier'] + knobs['crops'] + 0 * latency_ms")
    )
    assert rewards.all(torch.tensor([0]), torch.ones(1)).tolist() == [[4.0, 10.5]]


BODIES = {
    "raise OSError('two\\nlines')": "raises OSError: two",
    "return accuracy + knobs['sizes']": "raises KeyError: 'sizes'",
    "return Path('weights.txt').read_text()": "raises FileNotFoundError: ",
    "return (Path(__file__).read_text() != '') + accuracy": "raises PermissionError: opens ",
    "return 1.0": "returns float; must return a torch.Tensor",
    "return accuracy.mean()": "returns shape []; must be that of its arguments, [2, 2]",
    "return accuracy[:, :1]": "returns shape [2, 1]; must be",
    "return accuracy / (latency_ms - 2)": "returns inf in 1 of 3 profiled cells, the first "
    "with accuracy 0.6, lat",
    "return (budget_ms - latency_ms).log()": "returns -inf in ",
    "return accuracy + random.random()": "returns different rewards when it is called again",
    "return accuracy + torch.rand_like(accuracy)": "returns different rewards when it "
    "is called again",
    "return accuracy - accuracy.nanmean()": "depends on the other decisions in the batch",
    "return latency_ms.nan_to_num().softmax(-1)": "depends on the other decisions in the batch",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_function_that_cannot_be_used_is_refused_in_a_line(body: str, written: Written) -> None:
    config = written(body)
    with pytest.raises(InputError) as refused:
        ConfigBandit(TABLE, reward=config)
    assert str(refused.value).startswith(f"reward.function={config.function}: ")
    assert BODIES[body] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_its_module_may_read_a_file(written: Written) -> None:
    Path("weight.txt").write_text("3")
    config = written(
        "return weight * accuracy", before="weight = float(Path('weight.txt').read_text())"
    )
    assert RewardTable(TABLE, config).all(torch.tensor([1]), torch.ones(1))[0, 0] == 1.5
    assert Path("weight.txt").read_text() == "3"  # files can be opened again


@pytest.mark.parametrize("before", ["import no_such_package", "raise SystemExit(3)", "1 +"])
def test_a_module_that_cannot_be_imported(before: str, written: Written) -> None:
    with pytest.raises(
        InputError, match=r"importing mine_.* raises (ModuleNotFound|SystemExit|Syntax)"
    ):
        RewardTable(TABLE, written("return accuracy", before))


def test_what_shows_only_later_is_refused_where_it_shows(written: Written) -> None:
    rewards = RewardTable(TABLE, written("return accuracy / (budget_ms != 17)"))
    rows = torch.tensor([0])
    assert rewards.all(rows, torch.tensor([16.0])).isfinite().all()
    with pytest.raises(InputError, match=r"returns inf in 4 of 4 profiled cells, .* budget 17 ms"):
        rewards.all(rows, torch.tensor([17.0]))
