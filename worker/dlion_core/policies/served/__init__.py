"""Policies whose workers send what changed to a server, itself a worker, and go on from its
weights: `halos`, `quorum-diloco`."""
