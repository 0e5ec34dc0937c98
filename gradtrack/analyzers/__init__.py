"""Analyzers: plugins that measure more than the gradients, one folder each, and the tools that they share."""
