"""Policies that exchange gradients: `dlion`, `ako`, `topk`, `dgc`, `adacomp`, `twostep` and others.

`gradient_selectors` selects the entries of a gradient for each peer, `gradient_exchange` sends and
applies them.
"""
