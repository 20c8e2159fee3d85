"""A real Kubernetes cluster on this machine: etcd, control plane, and nodes with kubelet, containerd, runc, CNI and kube-proxy.

Each node has a network namespace and a mount namespace of its own, in which everything is at its stock path
(/var/lib/kubelet, /run/containerd/containerd.sock); cgroups are this machine's. `python -m tests.cluster up` makes one to work
with, the fixtures of conftest.py make one for the tests.
"""
