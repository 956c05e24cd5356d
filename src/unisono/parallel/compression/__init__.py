"""Gradients in fewer bytes: as factors of low rank, or as codes. The error of a step is sent later."""
