"""Tests of gradtrack.pages.terminal."""
