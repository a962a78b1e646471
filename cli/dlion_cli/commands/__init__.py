"""The subcommands: each parses its options and prints; the work is in the other packages."""
