"""Objects of a job that have to be created, updated or deleted."""
