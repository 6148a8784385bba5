"""Training of whole models in torch, for healing after pruning."""
