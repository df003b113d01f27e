"""Modules of the scripts that print docs/measurements.md. A row of a benchmark is a run."""
