"""Environments: the machines and links of a run, for the local runner and the simulator.

Contains the file's model and loading, its plan for a job's workers, and the published environments
(`files/`). `dlion_local` emulates a plan.
"""
