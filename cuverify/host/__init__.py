"""The host lane: CUDA text run and checked on a CPU."""
