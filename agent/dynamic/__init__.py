"""Configuration that the cluster changes while the agent runs: Katalyst's objects, laid over the settings file."""
