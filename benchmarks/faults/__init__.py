"""Faults of trackers, disks and processes: what they cost (`cost`), and what they harm (`torture`)."""

from benchmarks.faults.cost import run

__all__ = ["run"]
