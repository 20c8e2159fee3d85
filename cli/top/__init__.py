"""The `dioptase top` command: a live view of the agent in the terminal."""
