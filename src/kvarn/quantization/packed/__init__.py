"""Types of GGUF files that the native core does not write: IQ4_XS and MXFP4, in NumPy."""
