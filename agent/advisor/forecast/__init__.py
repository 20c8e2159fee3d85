"""Forecast of the peak of online use in the next hour, with a margin that is calibrated by its own misses."""
