"""Measurements on real ranks: `profile` writes the file of a cluster, `tune` finds the fastest of
the best predicted settings. Only `cli/` and benchmarks use it; it runs plans and needs torch."""
