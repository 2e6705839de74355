//! Benchmarks of pagevault. There is nothing in the library; `make bench` runs what is in `benches/`.
