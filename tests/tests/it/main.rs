//! All integration tests in one binary: one module an area.
mod capture;
mod collector;
mod end_to_end;
mod hook;
mod launch;
mod namespaces;
mod report;
mod sim;
mod viewer;
