"""Helpers that know nothing of gradients: names, secrets, progress, interrupts, ranks, statistics."""
