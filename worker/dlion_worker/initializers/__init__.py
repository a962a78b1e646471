"""Downloads of data sets and models before training (`spec.trainer.initializer`).

`store` keeps them by SHA-256, `http_file` gets one over HTTP, `http_opener` refuses insecure
redirects and slow servers, `s3_object` signs requests for an object store, `credentials` reads the
Secret's keys, `archives` unpacks it, `pod_process` is the init container, which reports its
progress. `dlion run` and `dlion simulate` use the store, too. Not here: what a data set or a model
consists of.
"""
