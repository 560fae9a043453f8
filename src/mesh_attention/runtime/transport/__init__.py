"""Transports: how the communication operations of a program really move bytes."""
