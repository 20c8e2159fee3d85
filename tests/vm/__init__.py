"""Tests that need a kernel of their own: booted by QEMU with version 2 cgroups, NUMA nodes, swap and disks."""
