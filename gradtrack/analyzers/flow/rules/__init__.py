"""The rules that judge samples of the gradient flow, grouped by subject."""
