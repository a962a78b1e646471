"""Certificates and keys of a worker: loading, renewal dates, storage, and proof of a peer's
name."""
