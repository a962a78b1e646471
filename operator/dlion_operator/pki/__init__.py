"""Authorities, certificates of workers, and the tokens by which pods prove who they are."""
