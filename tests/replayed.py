"""A model with knobs that answers from a profile, and the log of a controller in front of it."""

import copy
import functools
import os
import subprocess
import sys
import threading

import numpy as np
import torch
from helpers import driven_apart, small_table
from tensordict import TensorDict

from knobwise.agents import Controller, DeployedController, PolicyConfig
from knobwise.agents.calibration.deployed_controller import Calibration
from knobwise.agents.evaluation.baselines import fit_static
from knobwise.agents.learning.logged import Logged
from knobwise.agents.teacher.teacher import Teacher
from knobwise.envs import default_budgets
from knobwise.profiling.measuring.adaptive_model import Answer, FirstStage, KnobSupport, Request
from knobwise.serving import AdaptiveModel

SMALL = PolicyConfig(
    teacher=True,
    fold_networks=2,
    hidden=16,
    layers=1,
    dropout=0.0,
    teacher_hidden=8,
    teacher_dropout=0.0,
)
STEPS = 200
"""Of fitting heads that read nothing but the budget."""


class ReplayedModel:
    """Answers a request, whose image is a row of a table, in the time of its cell times a
    factor."""

    name = "replayed"

    def __init__(self, table, slower=lambda values: 1.0):
        self.table, self.slower = table, slower
        self.knobs = tuple(
            KnobSupport(knob.name, knob.values[-1], values=knob.values) for knob in table.knobs
        )
        self.columns = {
            tuple(table.configuration(c).items()): c for c in range(table.num_configurations)
        }

    def first_stage(self, request, features=True):
        blocks = {name: block[request.image].numpy() for name, block in self.table.features.items()}
        return FirstStage(request, blocks if features else {}, None, 0.0, 0.0)

    def answer(self, stages, configuration):
        answers = []
        for stage in stages:
            cell = stage.request.image, self.columns[tuple(configuration.items())]
            ms = float(self.table.latency_ms[cell]) * self.slower(configuration)
            answers.append(Answer(str(float(self.table.accuracy[cell])), ms, ms, 0.0, 1, 1, 1))
        return answers


# -- controllers that were not trained -------------------------------------------------------------


def calibration_for(table, deploy=None):
    """Mean latencies, and a guard for the default budgets, if it is said where it deploys the
    policy."""
    static = fit_static(table, torch.arange(table.num_samples))
    latency = {"bias": static.log_latency, "spread": static.spread.clip(1e-3)}
    calibration = Calibration(
        latency={name: values.astype(np.float32) for name, values in latency.items()}
    )
    if deploy is None:
        return calibration
    calibration.static = static.arrays()
    budgets = default_budgets(table).tolist()
    for budget, deployed in zip(budgets, deploy, strict=True):
        reason = "deployed" if deployed else "fell back"
        row = {"budget_ms": budget, "deployed": bool(deployed), "reason": reason}
        calibration.guard.append(row)
    return calibration


def untrained(table, config=None, deploy=None):
    """A controller that was not trained, whose networks and configurations differ; fall-backs as in
    `calibration_for`."""
    controller = driven_apart(table, config or PolicyConfig(hidden=8, dropout=0.0))
    return DeployedController(controller, None, calibration_for(table, deploy)).eval()


def teacher_beside(table, controller, constraint="deadline"):
    """A teacher of all samples that was not trained, whose weights differ."""
    samples, config = table.num_samples, controller.config
    everything = torch.ones(config.fold_networks, samples, dtype=torch.bool)
    about = config, controller.normaliser, everything, constraint
    teacher = Teacher.for_table(table, torch.arange(samples), *about)
    for parameter in teacher.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return teacher


@functools.cache
def _knows_means(samples):
    """Its teacher has the means of a small table; its heads imitate it, whatever the features."""
    table = small_table(samples)
    rows = torch.arange(samples)
    torch.manual_seed(0)
    controller = Controller.for_table(table, rows, SMALL).eval()
    everything = torch.ones(SMALL.fold_networks, samples, dtype=torch.bool)
    teacher = Teacher.for_table(table, rows, SMALL, controller.normaliser, everything).eval()
    width = controller.normaliser.width
    encoding = controller.network.encoding
    low, high = (float(encoding.mean + z * encoding.scale) for z in (-3, 4))
    limits = torch.linspace(low, high, 128).exp()
    utility = teacher.expected_utility(torch.zeros(1, width), limits.unsqueeze(0))[0]
    target = (SMALL.sharpness * utility).softmax(-1)
    x = torch.zeros(len(limits), width)
    controller.network.layers[0].weight.data[:, :width] = 0
    optimiser = torch.optim.Adam(controller.network.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    networks = SMALL.networks_trained
    for _ in range(STEPS):
        logits = controller.network(x.expand(networks, -1, -1), limits.expand(networks, -1))
        loss = -(target * logits).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    controller.requires_grad_(False)
    return DeployedController(controller, teacher, calibration_for(table, [1.0] * 5)).eval()


def small_stack(samples=200, falls_back=False):
    """A controller that knows the means of a small table, and nothing beyond; with a guard that
    falls back at every budget but the largest, or at none."""
    agent = copy.deepcopy(_knows_means(samples))
    for row in agent.calibration.guard[:-1]:
        row["deployed"] = not falls_back
    return agent, small_table(samples)


def child(code, *words, cwd=None):
    """A process that runs some Python, and writes lines; to be killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, text=True, env=environment, cwd=cwd)


# -- requests --------------------------------------------------------------------------------------


def serve_requests(model, table, count, label=True, seed=0):
    """Let a model answer random rows under random default budgets, and label the answers."""
    generator = np.random.default_rng(seed)
    budgets = (default_budgets(table) + 1).tolist()  # the controller's own time comes on top
    results = []
    rows = generator.integers(table.num_samples, size=count)
    for row, budget in zip(rows, generator.choice(budgets, count), strict=True):
        results.append(model.answer(Request(int(row), ""), float(budget)))
        if label and model.log is not None:
            model.log.label(results[-1].request_id, float(results[-1].answer.text))
    return results


class Clock:
    """A clock, in s, that stands still but where it is told to go on, and by a step at each reading;
    so nothing else on the machine counts."""

    def __init__(self, step=1e-6):
        self.now, self.step = 100.0, step
        self.lock = threading.Lock()

    def __call__(self):
        return self.go_on(self.step)

    def go_on(self, seconds):
        with self.lock:
            self.now += seconds
            return self.now


def timed_by(clock, served):
    """What serves requests, timed by this clock."""
    getattr(served, "runtime", served).now = clock
    return served


def logging_model(folder, agent, table, slower=lambda values: 1.0, **options):
    """A model that answers from a table, with a log, timed by a `Clock`."""
    model = AdaptiveModel(ReplayedModel(table, slower), agent, log=folder, **options)
    return timed_by(Clock(), model)


def logged_outcomes(choice, propensity, reward):
    """Requests of which nothing else is known."""
    n = len(choice)
    ones = torch.ones(n).double()
    times = dict.fromkeys(("scale", "guard_ms", "limit_ms", "answer_ms"), ones)
    return Logged(
        TensorDict({}, [n]),
        seen=ones > 0,
        met=ones > 0,
        abandoned=ones < 0,
        choice=torch.as_tensor(choice),
        propensity=torch.as_tensor(propensity).double(),
        offset=torch.zeros(n, len(propensity[0])),
        accuracy=torch.as_tensor(reward).double(),
        **times,
        batch_size=[n],
    )
