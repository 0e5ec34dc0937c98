"""The health rules, one file for each."""
