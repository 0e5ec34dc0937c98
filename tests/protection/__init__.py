"""Tests of gradtrack.protection."""
