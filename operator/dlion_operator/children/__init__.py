"""Render a run's Kubernetes objects: pure functions from a manifest to documents.

Includes merging a user's pod template. Not here: when objects are created
(`dlion_operator.plan.decide`) and how they are applied (`dlion_operator.controller.reconcile`).
"""
