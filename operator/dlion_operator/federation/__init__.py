"""The sites' operators exchange reports: which runs they serve, with which manifest and workers.

Pure modules: the reports (`reports`), changes to send (`outbound_reports`), what is known of other
sites (`state`) and where manifests differ (`drift`). The rest: the wire's limits (`messages`),
trust (`bundles`, `credentials`) and gRPC (`service`, `client`), assembled in `node`. Not here: the
consequences for a job (`dlion_operator.served_runs`, `dlion_operator.plan`), and gradients.
"""
