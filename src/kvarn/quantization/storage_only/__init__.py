"""Types of GGUF files that are written, but not computed in: IQ4_XS and MXFP4, encoded in NumPy."""
