"""Downloads of data sets and models before training (`spec.trainer.initializer`).

`store` keeps them by SHA-256, `http_file` gets one over HTTP, `credentials` makes its header,
`archives` unpacks it, `pod_process` is the init container. `dlion run` and `dlion simulate` use the
store, too. Uses the standard library only. Not here: what a data set or a model consists of.
"""
