"""The best plan of a model, from its own program: bytes by a dry run of each rank, seconds by its graph."""
