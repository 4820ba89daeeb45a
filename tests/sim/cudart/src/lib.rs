//! Part of the simulated device.
