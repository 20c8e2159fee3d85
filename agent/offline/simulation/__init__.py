"""A simulated node: loads over time in, snapshots out; decisions of a policy take effect in the next step."""
