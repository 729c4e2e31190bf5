"""The oracles: each stage in plain numpy, under the stem of its kernel."""
