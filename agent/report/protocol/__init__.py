"""Reporter plugins in processes of their own, as the reporter sees them."""
