"""How good a model file is: perplexity, divergence from a source, speed and size. Knows files and texts, no recipes."""
