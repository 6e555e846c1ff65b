"""On a GPU everything in the loop runs, and computes what it computes on the CPU."""

import pytest
import torch
from commands import BEAMS, TABLE, UNTAUGHT, launch, read_json, words_of, write_table
from helpers import needs_gpu, small_beams, small_table, trainer_on
from tensordict import TensorDict
from tiny_models import tiny_language_model
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.utils import check_env_specs

from knobwise.agents import PolicyConfig, load_checkpoint, make_actor
from knobwise.agents.controller.controller import Controller
from knobwise.envs import ConfigBandit
from knobwise.losses import GRPOLoss
from knobwise.profiling.huggingface.model import HuggingFaceModel
from knobwise.profiling.measuring.adaptive_model import Request

pytestmark = [needs_gpu, pytest.mark.usefixtures("home")]
QUICK = words_of(UNTAUGHT, "seeds=[0] own_cost=false baselines=false device=cuda name=run")
TEACHER = "optimiser.teacher_iterations=4"
ENVIRONMENTS = {
    "plain": {},
    "groups": {"group_size": 4},
    "penalty": {"unprofiled": "penalty", "group_size": 2},
    "configurations": {"action": "configuration", "full_information": True},
    "keys": {"action_keys": "knobs"},
    "rows": {"observe_features": False},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_gives_the_contexts_and_rewards_of_the_cpu(name):
    table = small_table(60, holes=0.3)
    here, there = (
        ConfigBandit(table, batch_size=64, seed=0, device=device, **ENVIRONMENTS[name])
        for device in ("cpu", "cuda")
    )
    context = here.rand_action(here.reset())
    there.reset()
    wanted = here.step(context.clone())["next"]
    result = there.step(context.to("cuda"))["next"]
    assert result.device.type == "cuda"
    for key, value in wanted.items():
        torch.testing.assert_close(result[key].cpu(), value, equal_nan=True)
    check_env_specs(there)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("looks_up", [False, True])
def test_a_policy_that_was_moved_learns_from_a_collector(looks_up, separate):
    """Also what was made on the CPU, and then moved."""
    table = small_table(60, holes=0.3)
    controller = Controller.for_table(table, torch.arange(40), PolicyConfig(hidden=16))
    rows = table if looks_up else None
    actor = make_actor(controller, rows, 4, separate=separate).to("cuda")
    keys = "knobs" if separate else "action"
    env = ConfigBandit(
        table,
        batch_size=32,
        group_size=4,
        action_keys=keys,
        observe_features=not looks_up,
        device="cuda",
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(32, device="cuda"), batch_size=16)
    loss = GRPOLoss(actor).to("cuda")
    batches = {"frames_per_batch": 32, "total_frames": 64}
    collector = Collector(env, actor, **batches, auto_register_policy_transforms=False)
    for data in collector:
        buffer.extend(data.reshape(-1))
        out = loss(buffer.sample())
        assert out["loss_objective"].is_cuda
        out["loss_objective"].backward()
    collector.shutdown()


@pytest.mark.parametrize("constraint", ["deadline", "mean"])
def test_networks_are_judged_as_on_the_cpu(constraint):
    """Before the first step both have the same weights."""
    scores = []
    for device in ("cpu", "cuda"):
        trainer = trainer_on(small_table(60), constraint=constraint, device=device)
        trainer.run()
        scores.append(trainer.state.scores[0][1])
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.parametrize(
    "words",
    [
        TEACHER,
        f"policy=utility loss=exact {TEACHER}",
        f"policy=utility loss=ppo policy.augment=0.3 {TEACHER}",
        "policy=independent budget=relative reward=shaped loss.kl_band=[0.01,0.1]",
        "policy=independent reward=function reward.function=examples.rewards:late_answers",
        f"policy=utility budget=mean budgets_ms=[10,14] {TEACHER}",
        "experiment=seeds policy.dropout=0.5",
    ],
)
def test_a_run_trains_resumes_and_is_judged(words):
    write_table(holes=0.2)
    launch("train", TABLE, QUICK, words)
    first = read_json("runs/latest/results.json")
    checkpoint = load_checkpoint("runs/latest/checkpoints/best.pt")
    assert next(checkpoint.agent.parameters()).device.type == "cpu"
    launch("train", TABLE, QUICK, words)
    assert read_json("runs/latest/results.json")["rows"] == first["rows"]


@pytest.mark.parametrize("version", ["v0", "v2"])
def test_a_selector_trains_on_recorded_demonstrations(version):
    small_beams(40)[0].save("b.safetensors")
    launch(
        "train experiment=selector_replay device=cuda judged_shots=[2] name=run",
        BEAMS,
        f"selector.version={version} variants.shuffled_recorded=null",
    )
    assert read_json("runs/selector_replay/run/results.json")["rows"]


def test_a_compiled_loss_gives_the_loss_and_its_gradient():
    table = small_table(60)
    controller = Controller.for_table(table, torch.arange(40), PolicyConfig(hidden=16)).to("cuda")
    loss = GRPOLoss(make_actor(controller, table, 4, action="configuration"), functional=False)
    data = TensorDict(
        {
            "row": torch.arange(32),
            "budget_ms": torch.linspace(4, 20, 32),
            "configuration": torch.arange(128).view(32, 4) % table.num_configurations,
            "action_log_prob": torch.full((32, 4), -2.4),
            "next": {"reward": torch.linspace(0, 1, 128).view(32, 4)},
        },
        [32],
        device="cuda",
    )
    gradients = []
    for module in (loss, torch.compile(loss)):
        total = module(data.clone())["loss_objective"]
        gradients.append(torch.autograd.grad(total, [*controller.network.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_language_model_answers_as_on_the_cpu():
    request = Request(None, "How many red dogs are there?")
    texts = []
    for device in ("cpu", "cuda"):
        model = HuggingFaceModel(*tiny_language_model(), max_new_tokens=8, device=device)
        (answer,) = model.answer([model.first_stage(request)], {"num_active_blocks": 2})
        texts.append(answer.text)
    assert texts[0] == texts[1]
