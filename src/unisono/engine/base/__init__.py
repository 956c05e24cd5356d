"""What every room uses: checks of arguments, timeouts, limits of the system, proofs of identity."""
