"""Figures of a run from its records: curves, totals, faults, and `summary.json`."""
