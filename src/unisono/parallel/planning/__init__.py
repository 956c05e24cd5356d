"""The best plan of a model, from its own program: bytes from a dry run of each rank, seconds from its graph."""
