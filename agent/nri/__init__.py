"""The container runtime asks here before it creates a container (NRI): its limits hold from its first instruction on."""
