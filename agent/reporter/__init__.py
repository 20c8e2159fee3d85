"""Reports the node to the API server: CustomNodeResource, Node taints, extended resources and events."""
