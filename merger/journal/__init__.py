"""What a merge notes down: steps, checkpoints, what became of each set, progress. Plain values only."""
