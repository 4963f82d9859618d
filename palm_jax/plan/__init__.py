"""What a run costs, worked out before it starts: pure arithmetic, no JAX, no files."""
