"""Strategies per operator: how each input is cut, and how values move from one layout to the next."""
