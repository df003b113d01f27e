"""What the scripts that print docs/measurements.md are made of. A row of a benchmark is a run."""
