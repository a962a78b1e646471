"""What runs beside the training loop: sidecar, data watch, publication, probes, renewal."""
