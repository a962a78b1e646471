"""Authorities, certificates of workers, and the tokens by which pods prove their identity."""
