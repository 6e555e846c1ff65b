"""Choose the knobs for one input yourself, under your own budget, and see what the choice gets
beside the best one.

    python examples/step_by_hand.py [picture.png]

With the name of a file it draws the outcome; without, it prints it.
"""

import sys

import gymnasium as gym
from PIL import Image

import knobwise

gym.register_envs(knobwise)


def main(picture: str | None = None) -> float:
    """Play one episode; return its reward."""
    env = gym.make("knobwise/ConfigBandit-v0", render_mode="rgb_array" if picture else "ansi")
    print(f"{env.action_space}, observed: {', '.join(env.observation_space)}")

    # your own choice of sample and budget; without options both are drawn
    observation, info = env.reset(seed=7, options={"sample_id": "29", "budget_ms": 40.0})
    print(f"sample {info['sample_id']}, budget {observation['budget_ms']:.1f} ms")

    # an action is the index of a value for each knob
    action = [2, 1, 1]  # the third max_crops, the second top_k, the second num_active_blocks
    _, reward, _, _, info = env.step(action)  # the episode ends: every episode is one decision
    print(f"chosen {info['configuration']}: {info['latency_ms']:.2f} ms, reward {reward:+.2f}")
    print(f"best   {info['oracle_configuration']}: {info['oracle_latency_ms']:.2f} ms")

    frame = env.render()
    if picture:
        Image.fromarray(frame).save(picture)
    else:
        print(frame)
    env.close()
    return float(reward)


if __name__ == "__main__":
    main(*sys.argv[1:])
