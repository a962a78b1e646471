"""A worker's certificates and keys: loading, renewal, storage, and proof of a peer's name."""
