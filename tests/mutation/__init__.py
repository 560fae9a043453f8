"""Mutation testing: are the tests sharp? (`run.py`, `make mutants`)."""
