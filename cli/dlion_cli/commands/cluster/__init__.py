"""Subcommands that talk to clusters."""
