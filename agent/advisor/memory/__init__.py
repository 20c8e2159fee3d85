"""Memory advice: what is promised to reclaimed pods, how short memory is, and who gives some up. Pure."""
