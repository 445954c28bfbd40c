"""The parts that all benchmarks share: rows and their file, isolated workers, statistics, tables, pages, workloads."""
