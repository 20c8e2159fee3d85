"""Distribution of configuration objects to nodes by KatalystCustomConfig, with canary rollout."""
