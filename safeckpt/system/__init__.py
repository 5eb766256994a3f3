"""What the rest builds on: threads, hints to the operating system, and private names of torch."""
