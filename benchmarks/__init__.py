"""Measurements of pipefit's own speed: `python -m benchmarks NAME`."""
