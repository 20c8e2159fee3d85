"""From sizes to CPUs: which CPUs each pool and each container has. Pure, like the advisor."""
