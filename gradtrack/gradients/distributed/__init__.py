"""Gradients that are spread over ranks: shards, partial sums, the all-reduce of what was measured."""
