"""C kernels, compiled at their first use where there is a compiler; numpy or torch otherwise."""
