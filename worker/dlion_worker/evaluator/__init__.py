"""Evaluates replicas of a local run in one process, outside every worker's quota.

Trainers pass snapshots of their weights through a folder. The trainer decides when to evaluate, and
asks for the final evaluations (`final_evaluations`). On several machines each worker evaluates in a
thread instead, because only it has its weights.
"""

RECORDS_FILE = "records.jsonl"
"""File in the folder of snapshots: one line per evaluation."""
