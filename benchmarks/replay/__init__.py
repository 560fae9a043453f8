"""One rank of a large plan on one real GPU: real kernels and streams, a modelled network."""
