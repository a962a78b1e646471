"""The API server: requests, watches, the store of objects, and the Lease of a namespace."""
