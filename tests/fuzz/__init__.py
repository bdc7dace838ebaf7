"""What may come from outside, bent and broken: accepted, or refused in words, and nothing else."""
