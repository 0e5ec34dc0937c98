"""Where issues are posted when they open: one file per alert."""
