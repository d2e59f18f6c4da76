"""Where clients run, and how many at a time: Flower Grids, and launchers for its runtimes."""
