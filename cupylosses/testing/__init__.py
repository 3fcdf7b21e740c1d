"""What tests and scripts need beyond the library itself; no part of it is imported by the library."""
