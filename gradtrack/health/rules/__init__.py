"""One file for each rule."""
