"""Bytes on disk to named tensors and back. Knows types and shapes; does not know what a model is."""
