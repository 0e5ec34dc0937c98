"""The journal of a run: every recorded row on disk before a tracker is told of it."""
