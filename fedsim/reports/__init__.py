"""Reports: HTML pages and pictures of runs, comparisons, sweeps, partitions and statistics."""
