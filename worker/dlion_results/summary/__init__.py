"""Figures of a run from its records: curves, totals and `summary.json`."""
