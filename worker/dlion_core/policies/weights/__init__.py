"""Policies that exchange weights or their changes: `gaia`, `hop`, `adpsgd`, `localsgd`, others."""
