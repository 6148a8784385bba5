"""What matters: statistics of activations on a text, and criteria over them."""
