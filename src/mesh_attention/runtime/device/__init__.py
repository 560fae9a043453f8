"""The streams and the memory of one rank."""
