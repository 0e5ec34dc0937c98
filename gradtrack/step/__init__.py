"""One training step, stage by stage.

1 `measure` collects and measures, 2 `protect` clips and handles non-finite values, 3 `judge` runs the rules,
4 `analyzers` runs what is due, 5 `history` keeps reports and sums, 6 `rows` makes records and log lines.
"""
