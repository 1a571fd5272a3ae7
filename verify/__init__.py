"""The judging side: reads a run record, re-derives what it claims, checks who signed it, and says what holds.

No torch, no GPU, no network. Nothing here imports `engine`: where both sides compute the same figure, this room
computes it by itself, from the published definition and in float64. Start at `verify.report.verify_record`.
"""
