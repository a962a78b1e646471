"""Evaluation beside a local run, outside every worker's quota.

What goes in: the folder through which trainers hand over snapshots of their weights, and the one
process that evaluates them. What stays out: when an evaluation is due, and the final one (the
trainer's). On a machine of its own a worker evaluates in a thread instead: nobody else has its
weights.
"""

RECORDS = "records.jsonl"
"""In the folder of snapshots: a line for each evaluation."""
