"""Tools of several analyzers: hooks, modules, samples, linear maps, spectra, offline runs, memory of issues."""
