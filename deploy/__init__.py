"""What puts the product onto machines and clusters: scripts, and manifests that are made from the code."""
