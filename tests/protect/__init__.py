"""Tests of gradtrack.protect."""
