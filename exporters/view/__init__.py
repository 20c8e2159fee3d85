"""The view of one cycle that the page, the terminal and the API share."""
