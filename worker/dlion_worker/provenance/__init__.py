"""Statements of what a saved model holds: written by its worker, signed by its site's keeper.

`dlion_api.protocol.provenance` defines the statement. Knows no network and no training.
"""
