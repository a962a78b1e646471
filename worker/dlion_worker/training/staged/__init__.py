"""Training behind a frozen encoder, and the sensors of topology `staged`.

What is sent, and when, is decided in `dlion_core.policies.staged`.
"""
