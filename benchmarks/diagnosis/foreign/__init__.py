"""Runs by authors who have seen neither the rules nor the figures of the diagnosis."""
