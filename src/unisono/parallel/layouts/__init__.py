"""Strategies per operator: how each input is cut, and how values get from one layout to the next."""
