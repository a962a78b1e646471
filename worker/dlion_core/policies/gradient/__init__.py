"""Policies that exchange gradients: `dlion`, `ako`, `topk`, `dgc`, `adacomp`, `twostep`, others."""
