"""The native engine: gradients in the memory of the CPU, measured and scaled by compiled loops."""
