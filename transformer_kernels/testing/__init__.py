"""What the tests and the benchmarks measure attention by. Nothing in the package imports it."""
