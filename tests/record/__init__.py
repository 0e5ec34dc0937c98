"""Tests of gradtrack.record."""
