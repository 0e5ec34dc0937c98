"""Tests of gradtrack.gradients.native."""
