"""Kernel to samples: one probe is NAME.bpf.c and NAME.py of one stem. Never imports bcc; a short child does."""
