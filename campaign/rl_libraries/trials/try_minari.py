"""Minari records infos too, in both of its formats, and gives back what was seen."""

import gymnasium
import minari
import numpy as np
from helpers import small_table

import knobwise  # noqa: F401  (registers the environment)

FORMS = {
    "complete": {"table": small_table()},
    "holes": {"table": small_table(holes=0.4), "action": "configuration"},
}
for data_format in ("hdf5", "arrow"):
    for name, options in FORMS.items():
        env = minari.DataCollector(
            gymnasium.make("knobwise/ConfigBandit-v0", **options),
            record_infos=True,
            data_format=data_format,
        )
        rows, latencies = [], []
        for seed in range(5):
            _, info = env.reset(seed=seed)
            rows.append(info["row"])
            *_, info = env.step(env.action_space.sample())
            latencies.append(info["latency_ms"])
        dataset = env.create_dataset(
            f"knobwise/{name}-{data_format}-v0",
            algorithm_name="random",
            author="knobwise",
            author_email="nobody@example.org",
            code_permalink="none",
        )
        episodes = list(dataset.iterate_episodes())
        assert [episode.infos["row"][0] for episode in episodes] == rows
        np.testing.assert_allclose([e.infos["latency_ms"][1] for e in episodes], latencies)
        assert all(np.isnan(episode.infos["latency_ms"][0]) for episode in episodes)
print(minari.__version__, "5 episodes with infos in each of hdf5 and arrow")
