"""What a machine is, and how long its kernels and links take: facts, and seconds that follow."""
