#!/bin/sh
# All that a CUDA card can show of memory and speed, in one call under ten minutes, after `make test`: a row
# table, the race against TRL, recorded decoding against plain, 512 rows at once and the largest batch in
# 24 GB and 300 steps in it, recovery from a real out of memory, and whether emptying the cache helps.
# Writes docs/measurements/gpu_CARD.json. On a CPU: --small, for a test.
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
