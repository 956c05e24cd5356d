"""Ways to run a plan. Today one: the engine over shared memory (`native`)."""
