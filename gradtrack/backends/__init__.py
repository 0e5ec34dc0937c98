"""Where records go: one file per backend."""
