"""Streams from the pods of a job: lines of logs, and files of the keeper."""
