"""From the arguments of people to a call that ranks make together: plans, and checked tensors."""
