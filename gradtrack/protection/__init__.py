"""Clipping strategies and the handling of non-finite gradients."""
