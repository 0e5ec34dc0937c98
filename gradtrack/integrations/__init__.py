"""Callbacks for Lightning, the Hugging Face Trainer and Stable-Baselines3, and a training loop over epochs."""
