"""Runs of further kinds of models, tasks and optimizers, each written before its diagnosis was looked at."""
