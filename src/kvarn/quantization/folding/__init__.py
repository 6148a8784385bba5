"""Scales folded into neighbouring weights: the same function, easier to round. AWQ and SmoothQuant choose them."""
