"""What several tests share: the float64 truth, cases to try, and a pool of gloo processes."""
