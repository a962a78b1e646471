"""Policies whose workers send what changed to a server, itself a worker, and continue from its
weights: `halos`, `quorum-diloco`."""
