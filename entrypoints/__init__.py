"""The `sol` command: the only room that knows the three others."""
