"""Lists the pods of this node: from a file, the kubelet, or the container runtime."""
