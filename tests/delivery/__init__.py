"""Tests of gradtrack.delivery."""
