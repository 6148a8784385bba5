"""What matters: statistics of activations, criteria over them, and the refit of what stays."""
