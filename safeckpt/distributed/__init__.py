"""Many processes as one run: agreement between ranks, the state that each rank has for itself, and shards."""
