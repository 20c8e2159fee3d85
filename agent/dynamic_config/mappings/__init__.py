"""Maps fields of Katalyst's configuration kinds to settings of the agent; pure."""
