"""Runs of further kinds of models, tasks and optimizers, each written before anybody had looked at its diagnosis."""
