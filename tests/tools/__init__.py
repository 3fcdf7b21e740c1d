"""Tools of the tests and scripts that users of the library do not need: mutants, compile gate, sweeps, exact truth."""
