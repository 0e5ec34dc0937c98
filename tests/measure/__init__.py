"""Tests of gradtrack.measure."""
