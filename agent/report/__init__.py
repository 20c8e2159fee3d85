"""What the node tells others about its decisions."""
