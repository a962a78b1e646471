"""Findings about one job: what is wrong, on which object, and what to do. Pure functions."""
