"""The API server of a cluster, and the contexts of a kubeconfig."""
