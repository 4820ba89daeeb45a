//! All integration tests in one binary: one module an area.
mod sim;
mod viewer;
