"""GGUF files: reader.py (one file), splits.py (several as one), writer.py."""
