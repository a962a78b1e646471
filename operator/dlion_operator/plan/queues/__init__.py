"""Quota of Kueue: Workloads of jobs, also those that MultiKueue dispatches to other clusters."""
