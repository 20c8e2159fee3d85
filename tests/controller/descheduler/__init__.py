"""Tests of the descheduler."""
