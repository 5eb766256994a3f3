"""Tests of safeckpt.state."""
