"""Measurement of gradients in one pass: parameter tables, engines, sums and histograms."""
