"""Starts one of a worker's processes in a pod: `python -m dlion_worker.pod ROLE`.

Reads what the operator mounts and sets (`dlion_api.protocol.pod_config`,
`dlion_api.cluster_names`), finds out which worker this is, and executes the container's process.
Imports little, so that a user's image starts at once.
"""
