"""The command `mesh-attention`: one file a subcommand, no torch before a subcommand needs it."""
