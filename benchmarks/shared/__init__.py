"""What several benchmarks lean on; it knows none of them."""
