"""The `dlion` command: one module per subcommand. It joins the parts of the other packages."""
