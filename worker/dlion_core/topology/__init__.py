"""Which workers exchange with which: fixed graphs, and groups from measured links."""
