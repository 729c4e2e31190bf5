"""One module a stage: it checks arguments, owns no buffers and launches kernels."""
