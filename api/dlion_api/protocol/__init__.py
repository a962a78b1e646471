"""What a job's processes send each other: configuration, membership, measurements, records."""
