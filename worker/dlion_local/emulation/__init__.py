"""Emulates an environment on this machine, and measures what it provides."""
