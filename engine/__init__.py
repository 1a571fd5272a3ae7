"""What runs: attention, caches, the seams into SGLang, checkpoints, checks of the machine, the evidence of a run."""
