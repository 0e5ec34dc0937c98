"""Protection of a step: clipping strategies and the handling of non-finite gradients."""
