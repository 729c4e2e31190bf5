"""CUDA text of the kernels; read with `importlib.resources`, imported as `cuverify.kernels_cu`."""
