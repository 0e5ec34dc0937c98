"""Tests of gradtrack.reports."""
