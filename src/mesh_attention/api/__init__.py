"""What people import: `ContextParallel`, `mesh_attention` and the arguments of both."""
