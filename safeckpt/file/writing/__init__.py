"""Payload to bytes: encode what a safe load can read back, pickle it, lay out the file and write it."""
