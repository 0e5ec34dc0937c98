"""Stable-Baselines3: the norm that PPO throws away, and its policy's entropy, in PPO's own table.

python examples/stable_baselines3_ppo.py
"""

from __future__ import annotations

from stable_baselines3 import PPO

from gradtrack.integrations.stable_baselines3 import GradtrackCallback


def main(timesteps: int = 4096, verbose: int = 1) -> GradtrackCallback:
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=512, seed=0, device="cpu", verbose=verbose)
    callback = GradtrackCallback(grad_log_every_n_steps=10)
    model.learn(timesteps, callback=callback)
    last = callback.reports[-1]
    print(f"{last.step} updates, the last with gradient norm {last.clipping.norm_before:.3f}")
    for issue in callback.manager.diagnose():
        print(issue)
    return callback


if __name__ == "__main__":
    main()
