"""Tests of gradtrack.gradients."""
