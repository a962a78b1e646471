"""What a job's state means: its phase, conditions, status and events."""
