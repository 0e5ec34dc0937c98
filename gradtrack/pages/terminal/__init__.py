"""Runs as text for a terminal."""
