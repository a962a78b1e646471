"""What to do about a job, from what the operator observes. Pure: no I/O and no clock."""
