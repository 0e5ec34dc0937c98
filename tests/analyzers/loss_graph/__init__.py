"""Tests of the analyzer of the loss graph."""
