"""Runs as text for a terminal: overview, tables, sparklines, and a view that follows a training."""
