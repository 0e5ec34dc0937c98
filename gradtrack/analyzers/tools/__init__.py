"""What several analyzers use: hooks, modules, samples, linear maps, spectra, offline runs, memory of issues."""
