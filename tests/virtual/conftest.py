"""Builds the library of virtual GPUs before the first test, whose time limit is not for that."""

from __future__ import annotations

from unisono.virtual.start import prepare

prepare()
