"""What a user sees of jobs, workers, links and logs, once or continuously."""
