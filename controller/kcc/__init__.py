"""KatalystCustomConfig: which node gets which configuration, and how fast a new one spreads."""
