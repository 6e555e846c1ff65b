"""A further cost beside time: the operations of every answer in the built-in profile, counted as
the model really runs.

    python examples/further_cost.py counted.safetensors
    knobwise train experiment=weights profile=table profile.path=counted.safetensors

Accuracies and latencies stay as measured. Twenty minutes.
"""

import sys
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from knobwise.common.progress import progress
from knobwise.envs import ProfileTable, builtin_profile
from knobwise.profiling.elastic.adapter import ElasticRequests
from knobwise.profiling.elastic.model import shipped_model
from knobwise.profiling.elastic.settings import Configuration


def counted(table: ProfileTable) -> ProfileTable:
    """Return a profile with `cost.mflop`, millions of operations in matrix products and attention.

    They depend only on the numbers of tokens and on the configuration, so each such case is counted
    once.
    """
    model = shipped_model()
    requests = ElasticRequests()
    cost = torch.empty_like(table.latency_ms)
    settings = [Configuration(**table.configuration(c)) for c in range(table.num_configurations)]
    cases: dict[tuple[int, ...], float] = {}
    with progress("counting operations", len(cost)) as tick:
        for row, sample in enumerate(table.sample_ids):
            scene = requests.request(sample)
            for column, setting in enumerate(settings):
                answer = model.generate(scene.image, scene.question, setting)
                case = (
                    answer.vision_tokens,
                    len(answer.tokens),
                    setting.top_k,
                    setting.num_active_blocks,
                )
                if case not in cases:
                    # the counter knows only the plain form of attention
                    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                        model.generate(scene.image, scene.question, setting)
                    cases[case] = counter.get_total_flops() / 1e6
                cost[row, column] = cases[case]
            tick(row + 1)
    return replace(table, cost=cost, cost_name="mflop")


if __name__ == "__main__":
    counted(builtin_profile()).save(sys.argv[1])
