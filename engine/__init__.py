"""What runs: attention, caches, the seams into SGLang, checkpoints, checks of the machine, and the evidence they leave."""
