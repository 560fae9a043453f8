"""Readers of a plan: proofs, counts, comparisons and pictures."""
