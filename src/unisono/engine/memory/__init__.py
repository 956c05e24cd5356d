"""Arrays that other ranks can read in place, and the addresses of buffers."""
