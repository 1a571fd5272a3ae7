"""The checkpoint a run loads: synthesised here, or fetched and verified."""
