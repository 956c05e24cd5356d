"""Elastic training: a run whose data axis shrinks when ranks die, and grows when new ones come.

docs/elastic.md is the guide, docs/adr/0017-elastic-training.md gives the reasons.
"""
