"""Relieves nodes that stay hot: moves reclaimed pods first, then movable online pods, to nodes that take them."""
