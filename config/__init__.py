"""What is to run: targets, prompts, published claims, locks, and the models of the run record.

Nothing here imports torch.
"""
