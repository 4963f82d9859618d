"""What XLA's compiler for TPUs says of a run: topologies and ahead-of-time compilation."""
