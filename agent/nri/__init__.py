"""Plugin of the container runtime (NRI): containers receive their limits before their first instruction."""
