"""Tests of gradtrack.step."""
