"""Tests of gradtrack.diagnose."""
