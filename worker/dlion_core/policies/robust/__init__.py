"""Means that one bad contribution cannot dominate (`exchange.robustness`).

Pure functions, called by the policies that combine the contributions of all workers at once. Every
worker must make the same bits from the same contributions, also one that has just joined. So the
functions know these contributions only, and sums have a fixed order. No I/O, no history.
"""
