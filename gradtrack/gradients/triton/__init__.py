"""The Triton engine: gradients in the memory of an accelerator, measured and protected by a few kernels."""
