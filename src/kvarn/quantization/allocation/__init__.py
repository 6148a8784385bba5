"""The type of every tensor for a size in bytes: what each costs in divergence, measured, and the best choice of all."""
