"""One model at several batch sizes, at equal work."""
