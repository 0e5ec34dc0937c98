"""Helpers on matplotlib that every picture uses; matplotlib is loaded when the first figure is made."""
