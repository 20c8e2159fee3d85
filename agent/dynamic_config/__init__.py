"""Dynamic configuration: Katalyst's configuration objects, merged over the settings file while the agent runs."""
