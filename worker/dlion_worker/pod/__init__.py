"""From a pod to one of a worker's processes: `python -m dlion_worker.pod trainer|sidecar|keeper`.

What goes in: reading what the operator mounts and sets (`dlion_api.pod_config`,
`dlion_api.cluster_names`), finding out which worker this is, and becoming the process that the
container is for. What stays out: everything that these processes do. Imports little, so that a
user's own image starts at once.
"""
