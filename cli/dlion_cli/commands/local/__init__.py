"""Subcommands that need no cluster."""
