//! All integration tests in one binary: one module an area.
mod capture;
mod sim;
mod viewer;
