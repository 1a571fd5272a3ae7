"""Reuse of the DiT block stack between denoising forwards: TeaCache and FirstBlockCache."""
