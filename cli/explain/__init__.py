"""The `dioptase explain` command: why a control, a pod or a pool has its value."""
