"""FP8 (E4M3) safetensors folders: codes, scales, and the config entries by which other engines read them."""
