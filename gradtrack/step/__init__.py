"""One training step, stage by stage."""
