"""History, files, journal and delivery of what was measured."""
