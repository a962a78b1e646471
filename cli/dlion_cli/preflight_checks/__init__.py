"""Checks of sites and clusters before a run; nothing here changes anything."""
