"""Tests of gradtrack.health."""
