"""The sites' operators tell each other what they see: which runs, by which manifest, who works.

What goes in: what is said (`reports`, `telling`), what is known of others (`state`) and where
manifests differ (`drift`), all pure; the wire's limits (`messages`), trust (`bundles`,
`credentials`) and the gRPC skin (`service`, `dialling`), put together in `node`. What stays out:
what follows from it for a job (`dlion_operator.site_runs`, `dlion_operator.findings`), gradients.
"""
