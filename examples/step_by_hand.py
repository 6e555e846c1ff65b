"""Choose the knobs for one input yourself, under your own budget, and see what the choice gets
beside the best one.

    python examples/step_by_hand.py [picture.png | film.gif]

Without a file it prints what a film shows: three episodes, before and after the step. A picture
shows the first outcome.
"""

import sys

import gymnasium as gym
from PIL import Image

import knobwise

gym.register_envs(knobwise)

# a budget in ms, and an action: the index of a value for each knob
EPISODES = [
    (40.0, [2, 1, 1]),  # the third max_crops, the second top_k, the second num_active_blocks
    (25.0, [2, 1, 1]),  # late under a smaller budget
    (25.0, [1, 1, 2]),  # fewer crops and one more block: on time, and still right
]


def main(file: str | None = None) -> float:
    """Play the episodes; return the last reward."""
    env = gym.make("knobwise/ConfigBandit-v0", render_mode="rgb_array" if file else "ansi")
    print(f"{env.action_space}, observed: {', '.join(env.observation_space)}")
    frames = []
    for budget_ms, action in EPISODES:
        # your own choice of sample and budget; without options both are drawn
        _, info = env.reset(seed=7, options={"sample_id": "29", "budget_ms": budget_ms})
        frames.append(env.render())
        # the episode ends: every episode is one decision
        _, reward, _, _, info = env.step(action)
        print(f"sample {info['sample_id']}, budget {info['budget_ms']:.1f} ms")
        print(f"chosen {info['configuration']}: {info['latency_ms']:.2f} ms, reward {reward:+.2f}")
        print(f"best   {info['oracle_configuration']}: {info['oracle_latency_ms']:.2f} ms")
        frames.append(env.render())
    env.close()

    if file is None:
        print(*frames, sep="\n\n")
    else:
        first, *others = map(Image.fromarray, frames if file.endswith(".gif") else frames[1:2])
        first.save(file, save_all=True, append_images=others, duration=2000, loop=0)
    return float(reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
