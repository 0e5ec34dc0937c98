"""Watch, protect and report the gradients of a PyTorch training run."""
