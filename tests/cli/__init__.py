"""Tests of gradtrack.cli."""
