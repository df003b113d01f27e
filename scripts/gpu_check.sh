#!/bin/sh
# All that a CUDA card can show of memory and speed, in one call under ten minutes, after `make test`: what it
# reaches in products and copies, a row table with each phase's seconds and bytes, recorded decoding against
# plain, the race against TRL, the largest batch in 24 GB and 100 steps of it, and recovery from a real out of
# memory. Writes docs/measurements/gpu_CARD.json after each part. --quick: the first of these, in two minutes.
# On a CPU: --small, for a test.
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
