"""What a run leaves behind: digests of bits, its environment, its logbook, its checkpoints."""
