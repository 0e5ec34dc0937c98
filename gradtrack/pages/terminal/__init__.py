"""Runs as text for a terminal: overview with sparklines, and a view that follows a training."""
