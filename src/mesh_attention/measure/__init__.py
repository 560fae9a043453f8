"""Measuring on real ranks: what a cluster's file says of this one (`profile`), and which of the
best predicted settings is the fastest (`tune`)."""
