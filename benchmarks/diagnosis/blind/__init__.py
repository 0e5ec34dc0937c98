"""Runs that were written after the rules, with other architectures, data and faults, and looked at once."""
