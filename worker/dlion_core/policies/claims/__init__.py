"""What a peer with a valid certificate may claim, bounded by what the receiver can know.

`samples` bounds counts of samples and `magnitudes` received values. Iterations:
`policies.iteration_guard`. No I/O.
"""
