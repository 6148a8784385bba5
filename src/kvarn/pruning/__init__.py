"""Smaller models by leaving parts out: layers, channels of the feed-forward, attention heads."""
