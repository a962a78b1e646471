"""kopf's handlers, the work queue, and the process."""
