"""Files that a command reads: manifests, programs, policies, bundles, archives."""
