"""Options, tables, units and errors as every command prints them."""
