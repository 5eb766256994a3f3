"""Bytes to payload: open a file once, verify it through that handle, and read through it."""
