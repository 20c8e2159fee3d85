"""A node that is only computed: loads over time in, snapshots out, what a policy decides of them felt in the next. Pure."""
