"""HTTP serving that agent and controller share: listener, responses, TLS and authentication."""
