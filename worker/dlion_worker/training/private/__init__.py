"""Training in which no step shows much about a single sample (`trainer.privacy`, docs/privacy.md).

Contents: gradients that are clipped by sample and noised, and batches that use a sample once. Not
here: how much privacy remains, which `dlion_results.summary.privacy` computes from the records.
"""
