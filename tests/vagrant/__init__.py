"""The Vagrantfile, really run: a box of the project's own, libvirt without KVM, and namespaces that end with the test."""
