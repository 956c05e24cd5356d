"""A model as a graph: what it does, recorded once on shapes, and what follows from it for a plan."""
