"""Gradients that are spread over ranks: shards, partial sums, and the all-reduce of measured sums."""
