"""Ranks that call together: what they compare before data moves, and what ends a call for all."""
