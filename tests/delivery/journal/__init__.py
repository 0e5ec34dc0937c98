"""Tests of gradtrack.delivery.journal."""
