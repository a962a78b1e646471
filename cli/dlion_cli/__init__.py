"""The `dlion` command: one module per subcommand; parts of the other packages are joined here."""
