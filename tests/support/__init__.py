"""Tests of gradtrack.support."""
