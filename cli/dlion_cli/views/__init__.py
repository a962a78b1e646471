"""What a user sees of jobs, workers and links, once or continuously."""
