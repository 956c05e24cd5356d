"""Gradients in fewer bytes: as factors of low rank, or as codes, with what is left out sent later."""
