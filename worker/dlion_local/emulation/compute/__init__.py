"""Emulated compute capacity: CPU quotas of control groups, or duty cycles."""
