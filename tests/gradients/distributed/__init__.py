"""Tests of gradtrack.gradients.distributed."""
